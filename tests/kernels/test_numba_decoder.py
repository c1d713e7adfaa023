"""The decoder that writes every layer's results to the same tensors: bit for bit what the plain one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.linear import Int4Linear, Linear
from mini_engine.model import Decoder
from mini_engine.numba_decoder import NumbaDecoder
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir, to_gguf

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# Chunks of a prompt beside new tokens of others, and steps of new tokens alone.
PROMPTS = [{"prompt_token_ids": [(5 * i + 11 * j * j) % 256 for j in range(n)]} for i, n in enumerate((1, 3, 40, 17))]


def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, run_layers) -> list[torch.Tensor]:
    """The logits of every step."""
    seen: list[torch.Tensor] = []
    forward = Decoder.forward

    def watched(*given: Any) -> torch.Tensor:
        seen.append(forward(*given))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NumbaDecoder, "run_layers", run_layers)
        patch.setattr(Decoder, "forward", watched)
        llm.generate(PROMPTS, PARAMS)
    return seen


def returned(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products of layers that made a tensor to return, in all steps."""
    count = 0

    def counted(of: type[Linear]):
        original = of.__call__

        def product(self: Linear, x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += type(self) is of and self is not llm.engine.runner.model.head
            return original(self, x)

        return product

    with monkeypatch.context() as patch:
        for of in (Linear, Int4Linear):
            patch.setattr(of, "__call__", counted(of))
        llm.generate(PROMPTS, PARAMS)
    return count


def q4_llama(folder: Path) -> Path:
    return to_gguf(tiny_llama_dir(folder), folder / "q4.gguf", "Q4_1")


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "bfloat16"}])
@pytest.mark.parametrize("build, dtype", [(tiny_llama_dir, "float32"), (tiny_qwen3_dir, "float32"), (q4_llama, "auto")])
def test_same_bits_as_the_plain_decoder(
    build, dtype: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    more: dict[str, Any] = {"dtype": dtype, "kv_cache_memory_bytes": 2**22, "enable_prefix_caching": False}
    llm = LLM(str(build(tmp_path)), max_num_batched_tokens=24, **more, **options)
    assert type(llm.engine.runner.model) is NumbaDecoder
    assert any(type(layer.o) is Int4Linear for layer in llm.engine.runner.model.layers) == (dtype == "auto")
    plain, buffered = (run(llm, monkeypatch, of.run_layers) for of in (Decoder, NumbaDecoder))
    assert len(plain) == len(buffered) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, buffered, strict=True))
    assert returned(llm, monkeypatch) == 0


def test_other_dtypes_go_the_plain_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(str(tiny_llama_dir(tmp_path)), dtype="bfloat16", kv_cache_memory_bytes=2**22)
    assert type(llm.engine.runner.model) is NumbaDecoder
    assert returned(llm, monkeypatch) > 0


@pytest.mark.parametrize(
    "build, options",
    [
        (tiny_llama_dir, {"attention_backend": "torch"}),
        (tiny_llama_dir, {"tensor_parallel_size": 2, "distributed_executor_backend": "local"}),
        (tiny_deepseek_v2_dir, {}),
    ],
)
def test_others_have_their_own_decoder(build, options: dict, tmp_path: Path):
    llm = LLM(str(build(tmp_path)), dtype="float32", kv_cache_memory_bytes=2**22, **options)
    runner = llm.engine.runner
    assert not any(type(one.model) is NumbaDecoder for one in getattr(runner, "ranks", [runner]))
