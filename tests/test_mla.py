"""The DeepSeek-V2 decoder against transformers on tiny random models, and the two forms of its attention against each
other. Most models here take the naive form from 20 new tokens on (`MLAShape.naive_break_even`): prompts take both.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine import LLM, SamplingParams
from mini_engine import mla as mla_module
from mini_engine.attention import attend
from mini_engine.latent_attention import absorbed_query, half_split, naive_attention, values_of
from mini_engine.mla import MLADecoder
from mini_engine.model_config import MLAShape, ModelConfig
from mini_engine.ops import rotate
from mini_engine.rotary import rotary_table
from tests.builders import YARN_SCALING, tiny_deepseek_v2_dir

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BLOCK = 4
PROMPTS = [
    [5],  # shorter than a block
    [7, 8, 9, 10],  # a full block
    list(range(10, 15)),  # one beyond it
    list(range(30, 51)),  # the shortest naive chunk
    list(range(10, 75)),  # in several chunks
    [40, 41] * 60,
]
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": YARN_SCALING},
    "q-lora": {"q_lora_rank": 40, "rms_norm_eps": 1e-3},
    "groups": {**GROUPS, "seed": 1},
    "all-dense": {"first_k_dense_replace": 3, "seed": 2},
    "all-moe-tied": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
    "wide-values": {"v_head_dim": 32, "kv_lora_rank": 64, "seed": 3},  # wider than the keys
    "everything": {"rope_parameters": YARN_SCALING, "q_lora_rank": 40, **GROUPS, "seed": 4, "n_shared_experts": 1},
}


def prompts(tokens: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in tokens]


def engine(path: Path, **settings: Any) -> LLM:
    usual = {"dtype": "float32", "block_size": BLOCK, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 200}
    return LLM(str(path), **{**usual, **settings})


def decoder(llm: LLM) -> MLADecoder:
    model = llm.engine.runner.model
    assert isinstance(model, MLADecoder)
    return model


def generate(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(PROMPTS), params)]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_deepseek_v2_dir(tmp_path_factory.mktemp("mla"), **CASES["everything"])


@pytest.fixture(scope="module")
def expected(everything: Path) -> list[list[int]]:
    """Tokens of the engine as it is, which `test_logits_and_tokens_equal_transformers` holds to transformers."""
    return generate(engine(everything))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_equal_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of transformers over prompt and answer: each of our tokens is its best one, each row of our logits its
    row at that place, whichever chunks, blocks and form they were computed in."""
    from transformers import AutoModelForCausalLM

    path = tiny_deepseek_v2_dir(tmp_path, **CASES[case])
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
    llm = engine(path)
    forward, seen = decoder(llm).forward, []

    def recorded(*args: Any) -> torch.Tensor:
        seen.append(forward(*args))
        return seen[-1]

    monkeypatch.setattr(decoder(llm), "forward", recorded)
    alone = []
    for prompt in PROMPTS:
        seen.clear()
        tokens = llm.generate(prompts([prompt]), GREEDY)[0].outputs[0].token_ids
        reference = peer(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.cat(seen), reference, rtol=1e-4, atol=2e-4)
        assert tokens == reference.argmax(-1).tolist()
        alone.append(tokens)
    assert generate(llm) == alone


def test_the_models_of_the_test_above_use_what_they_are_to_test(everything: Path, tmp_path: Path) -> None:
    """YaRN, its softmax scale, and the limit to groups each change tokens here."""
    overrides = CASES["everything"]
    rope = {**YARN_SCALING, "mscale": 1.0, "mscale_all_dim": 1.0}
    tokens = generate(engine(everything))
    changes: dict[str, dict[str, Any]] = {
        "no-yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        "no-scale": {"rope_parameters": rope},
        "no-groups": {"topk_method": "greedy"},
    }
    for name, change in changes.items():
        other = tiny_deepseek_v2_dir(tmp_path, name, **{**overrides, **change})
        assert generate(engine(other)) != tokens, name


def test_both_forms_are_used_and_agree(everything: Path, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch of all prompts: steps with sequences of both forms, and with a naive chunk after a context."""
    calls: list[tuple[int, int]] = []
    mixed: list[bool] = []
    split = MLADecoder._split

    def count_naive(q: torch.Tensor, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append((len(q), len(latents)))
        return naive_attention(q, latents, *rest)

    def count_mixed(*args: Any) -> Any:
        found = split(*args)
        mixed.append(found.absorbed is not None)
        return found

    monkeypatch.setattr(mla_module, "naive_attention", count_naive)
    monkeypatch.setattr(MLADecoder, "_split", count_mixed)
    used = {}
    for name, above in {"both": None, "absorbed": math.inf, "naive": 0}.items():
        calls.clear()
        mixed.clear()
        llm = engine(everything)
        if above is not None:
            decoder(llm).naive_above = above
        assert generate(llm) == expected
        used[name] = (list(calls), any(mixed))
    assert used["absorbed"] == ([], False) and len(used["naive"][0]) > 200
    chunks, were_mixed = used["both"]
    assert were_mixed and all(num_new >= 20 for num_new, _ in chunks)
    assert any(length > num_new for num_new, length in chunks)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 7},
        {"block_size": 16, "max_num_batched_tokens": 256},
        {"block_size": 1, "num_gpu_blocks_override": 350},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "max_model_len": 160},
        {"num_gpu_blocks_override": 35},
        {"num_gpu_blocks_override": 35, "preemption_mode": "swap", "swap_space_bytes": 1 << 20},
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_settings_change_no_token(everything: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    outputs = engine(everything, **settings).generate(prompts(PROMPTS), GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == (
        settings.get("num_gpu_blocks_override") == 35
    )


def test_a_prefix_hit_changes_no_token(everything: Path, expected: list[list[int]]) -> None:
    llm = engine(everything)
    assert generate(llm) == expected
    again = llm.generate(prompts(PROMPTS), GREEDY)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert max(output.metrics.num_cached_tokens for output in again) == 116
    longer = prompts([PROMPTS[4] + list(range(100, 130))])  # its naive chunk comes after cached blocks
    hit = llm.generate(longer, GREEDY)[0]
    fresh = engine(everything, enable_prefix_caching=False).generate(longer, GREEDY)[0]
    assert (hit.metrics.num_cached_tokens, fresh.metrics.num_cached_tokens) == (64, 0)
    assert hit.outputs[0].token_ids == fresh.outputs[0].token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3, "num_padded_query_heads": 6},  # experts of 20 elements do not come out even
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "dcp_q_replicate": True},
    ],
    ids=str,
)
def test_ranks_change_no_token(everything: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    """Heads, experts and vocabulary shared out; with dcp_q_replicate a rank absorbs queries of heads it projects no
    value of. Naive chunks get the context gathered from all ranks, in another order."""
    llm = engine(everything, distributed_executor_backend="local", **settings)
    assert generate(llm) == expected


def test_latents_come_back_from_the_host(everything: Path, expected: list[list[int]]) -> None:
    """A pool that holds one long request, and a host cache for what it gives up."""
    llm = engine(everything, num_gpu_blocks_override=36, host_cache_bytes=1 << 20)
    assert [generate(llm), generate(llm)] == [expected, expected]
    again = llm.generate(prompts(PROMPTS), GREEDY)
    assert sum(output.metrics.num_cached_tokens for output in again) > 36 * BLOCK


def test_forks_share_and_copy_latents(everything: Path, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=8, ignore_eos=True)
    ways = [engine(everything, **kind).generate(prompts(PROMPTS[2:3]), params)[0] for kind in ({}, {"block_size": 32})]
    tokens = [[output.token_ids for output in way.outputs] for way in ways]
    assert tokens[0] == tokens[1] and len(set(map(tuple, tokens[0]))) > 1


def test_bfloat16_stays_near_float32(everything: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    top = {}
    for dtype in ("float32", "bfloat16"):
        out = engine(everything, dtype=dtype).generate(prompts(PROMPTS[4:5]), params)[0].outputs[0]
        top[dtype] = {token: entry.logprob for token, entry in (out.logprobs or [])[0].items()}
    best = max(top["float32"], key=top["float32"].__getitem__)
    assert top["bfloat16"][best] == pytest.approx(top["float32"][best], abs=0.3)


def test_bytes_held_and_read(everything: Path) -> None:
    llm = engine(everything, num_gpu_blocks_override=10)
    runner, config = llm.engine.runner, llm.engine.model_config
    assert runner.weight_bytes == 4 * config.num_params
    assert decoder(llm).read_bytes() == 4 * config.num_params_read < runner.weight_bytes
    assert runner.kv_bytes == 10 * BLOCK * config.kv_bytes_per_token("float32") == 10 * BLOCK * 3 * (48 + 8) * 4


SHAPES = st.builds(
    MLAShape,
    q_lora_rank=st.none(),
    kv_lora_rank=st.integers(1, 12),
    qk_nope_head_dim=st.integers(1, 6),
    qk_rope_head_dim=st.sampled_from([2, 4]),
    v_head_dim=st.integers(1, 12),
)


@given(shape=SHAPES, heads=st.integers(1, 4), context=st.integers(0, 9), new=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_the_forms_compute_the_same(shape: MLAShape, heads: int, context: int, new: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q, latents = rand(new, heads, shape.qk_head_dim), rand(context + new, shape.cached_dim)
    up, scale = rand(heads, shape.qk_nope_head_dim + shape.v_head_dim, shape.kv_lora_rank), 0.37
    visible = torch.ones(new, context + new, dtype=torch.bool).tril(context)
    query = absorbed_query(q, up, shape).transpose(0, 1)
    state = attend(query, latents[None], latents[None, :, : shape.kv_lora_rank], scale, visible)
    absorbed = values_of(state.out.transpose(0, 1).double(), up, shape)
    naive = naive_attention(q, latents, up, shape, scale)
    torch.testing.assert_close(absorbed, naive, rtol=1e-3, atol=1e-4)
    order = torch.randperm(context, generator=generator)
    shuffled = torch.cat((latents[:context][order], latents[context:]))
    torch.testing.assert_close(naive_attention(q, shuffled, up, shape, scale), naive)


def test_naive_by_the_definition() -> None:
    """One pair of numbers at a time: key [K_h c, p], value V_h c, softmax over what a token may see."""
    shape, heads, scale = MLAShape(None, 3, 2, 2, 4), 2, 0.5
    generator = torch.Generator().manual_seed(1)
    q, latents = (torch.randn(*size, generator=generator) for size in ((2, heads, 4), (5, 5)))
    up = torch.randn(heads, 6, 3, generator=generator)
    out = naive_attention(q, latents, up, shape, scale)
    for token, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        weights, values = [], []
        for latent in latents[: 4 + token]:
            key = torch.cat((up[head, :2] @ latent[:3], latent[3:]))
            weights.append(math.exp(scale * float(q[token, head] @ key)))
            values.append(up[head, 2:] @ latent[:3])
        mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        torch.testing.assert_close(out[token, head], mean)


def test_half_split_rows_score_like_interleaved_pairs() -> None:
    """DeepSeek turns elements 2i and 2i+1 of a head, this engine i and i + D/2 of the new order: scores are equal."""
    config = ModelConfig("llama", 1, 64, 1, 1, 8, 64, 16, True)
    table = rotary_table(config, 20, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    w_q, w_k, x, y = (torch.randn(*size, generator=generator) for size in ((8, 6), (8, 6), (6,), (6,)))

    def interleaved(rows: torch.Tensor, hidden: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.view_as_complex((rows @ hidden).view(-1, 2))
        frequency = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
        return torch.view_as_real(pairs * torch.polar(torch.ones(4), position * frequency)).flatten()

    def ours(rows: torch.Tensor, hidden: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = table[[position]].unsqueeze(1).unbind(2)
        return rotate((half_split(rows) @ hidden)[None, None], cos, sin).flatten()

    for q_position, k_position in [(0, 0), (7, 3), (19, 0)]:
        score = interleaved(w_q, x, q_position) @ interleaved(w_k, y, k_position)
        torch.testing.assert_close(ours(w_q, x, q_position) @ ours(w_k, y, k_position), score)
    assert half_split(torch.arange(6.0)[:, None]).flatten().tolist() == [0, 2, 4, 1, 3, 5]
