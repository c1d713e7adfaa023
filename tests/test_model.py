"""The decoder against transformers, on tiny random models of every kind we support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.config import ModelConfig
from mini_engine.ops import rms_norm, rotate
from mini_engine.rotary import inverse_frequencies, rotary_table
from tests.builders import LLAMA3_SCALING, tiny_llama_dir, tiny_qwen3_dir, to_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5], [7, 8, 9], list(range(10, 75)), [40, 41] * 60]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tiny_llama_dir, {}),
    "llama-tied": (tiny_llama_dir, {"tie_word_embeddings": True}),
    "llama-llama3-rope": (tiny_llama_dir, {"rope_scaling": LLAMA3_SCALING}),
    "llama-one-kv-head": (tiny_llama_dir, {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "llama-no-gqa": (tiny_llama_dir, {"num_key_value_heads": 4}),
    "llama-big-theta": (tiny_llama_dir, {"rope_theta": 500_000.0, "rms_norm_eps": 1e-3}),
    "qwen3": (tiny_qwen3_dir, {}),
    "qwen3-tied": (tiny_qwen3_dir, {"tie_word_embeddings": True, "head_dim": 32}),
}


def reference(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of transformers' own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=-1, **settings)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    build, overrides = CASES[case]
    path = build(tmp_path, **overrides)
    llm = LLM(str(path), dtype="float32", block_size=4, max_num_batched_tokens=16)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.outputs[0].token_ids == reference(path, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir])
def test_gguf_computes_what_the_safetensors_do(build, kind: str, tmp_path: Path) -> None:
    path = build(tmp_path, rope_scaling=LLAMA3_SCALING) if build is tiny_llama_dir else build(tmp_path)
    file = to_gguf(path, tmp_path / "model.gguf", kind)
    prompt = {"prompt_token_ids": list(range(10, 75))}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    exact, gguf = (LLM(str(where), dtype="float32").generate(prompt, params)[0].outputs[0] for where in (path, file))
    if kind == "F32":
        assert gguf.token_ids == exact.token_ids
    first_exact, first_gguf = (next(iter((out.logprobs or [])[0].values())).logprob for out in (exact, gguf))
    assert first_gguf == pytest.approx(first_exact, abs=1e-4 if kind == "F32" else 0.5)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    path = tiny_llama_dir(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    prompt = {"prompt_token_ids": list(range(10, 60))}
    top = {}
    for dtype in ("float32", "bfloat16", "float16"):
        out = LLM(str(path), dtype=dtype).generate(prompt, params)[0].outputs[0]
        top[dtype] = {token: entry.logprob for token, entry in (out.logprobs or [])[0].items()}
    best = max(top["float32"], key=top["float32"].__getitem__)
    for dtype, tolerance in (("bfloat16", 0.3), ("float16", 0.03)):
        assert top[dtype][best] == pytest.approx(top["float32"][best], abs=tolerance)


def test_rotary_table_equals_transformers_for_llama3() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**LLAMA3_SCALING, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    hf = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=scaling)
    config = ModelConfig.from_hf({**hf.to_dict(), "architectures": ["LlamaForCausalLM"]})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=1e-6, atol=0)


def test_rotation_preserves_length_and_depends_on_distance_only() -> None:
    config = ModelConfig("llama", 1, 64, 1, 1, 64, 64, 16, True)
    table = rotary_table(config, 40, torch.float32, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = table[[position]].unsqueeze(1).unbind(2)
        return rotate(x, cos, sin)

    assert at(q, 7).norm() == pytest.approx(q.norm().item(), rel=1e-5)
    near = (at(q, 9) * at(k, 4)).sum().item()
    assert (at(q, 35) * at(k, 30)).sum().item() == pytest.approx(near, rel=1e-4)
    assert (at(q, 35) * at(k, 20)).sum().item() != pytest.approx(near, rel=1e-2)


def test_rms_norm_takes_its_mean_in_float32() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # 300² overflows float16
    assert rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6).tolist() == [[1.0] * 4]
