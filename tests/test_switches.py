"""Every optimisation has an off switch, and greedy tokens in float32 are the same with it on and off."""

from __future__ import annotations

import itertools

import pytest

from mini_engine import LLM, SamplingParams
from tests.builders import tiny_llama_dir

SHARED = list(range(40, 78))
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 9], [11, 12, 13], [*SHARED, 5, 6, 7], list(range(20, 60)), [80] * 33]
MAX_TOKENS = 20
BUDGETS = (1, 7, 64, 4096)
TIGHT_TOKENS = 96  # KV for the longest request (61 tokens) and half of another one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def answers(model: str, fork: bool = False, **options) -> tuple[list[list[int]], LLM]:
    """Greedy tokens of all prompts. With fork, each prompt has three outputs, drawn with top_k=1."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    if fork:
        params = SamplingParams(n=3, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = LLM(model, dtype="float32", **options)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for output in outputs:
        assert len({tuple(each.token_ids) for each in output.outputs}) == 1, "greedy siblings went apart"
    llm.engine.scheduler.blocks.check([])
    return [output.outputs[0].token_ids for output in outputs], llm


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[int]]:
    """One request at a time, whole prompts, no sharing: nothing that could go wrong."""
    return answers(model, max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=4096)[0]


@pytest.mark.parametrize(
    ("budget", "block_size", "caching", "tight", "fork"),
    list(itertools.product(BUDGETS, (4, 16), (True, False), (True, False), (True, False))),
)
def test_tokens_do_not_change(
    model: str, plain: list[list[int]], budget: int, block_size: int, caching: bool, tight: bool, fork: bool
) -> None:
    options = {"max_num_batched_tokens": budget, "block_size": block_size, "enable_prefix_caching": caching}
    if tight:
        options["num_gpu_blocks_override"] = TIGHT_TOKENS // block_size + 1
    tokens, llm = answers(model, fork, **options)
    assert tokens == plain
    stats = llm.engine.scheduler.stats
    if tight and budget >= 64:
        assert stats.num_preemptions > 0, "the pool was not tight enough to test anything"
    if caching and not tight:
        assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"batching": "fixed", "max_num_seqs": 3},
        {"batching": "fixed", "max_num_batched_tokens": 7},
        {"admission": "reserve", "num_gpu_blocks_override": 12},
        {"scheduling_policy": "priority", "num_gpu_blocks_override": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"long_prefill_token_threshold": 5},
        {"kv_cache_dtype": "float32", "max_model_len": 64},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_other_switches(model: str, plain: list[list[int]], options: dict) -> None:
    tokens, llm = answers(model, **options)
    assert tokens == plain
    if options.get("admission") == "reserve":
        assert llm.engine.scheduler.stats.num_preemptions == 0
