"""Every optimisation has an off switch, and greedy tokens in float32 are the same with it on and off."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.scheduler import SchedulerOutput
from tests.builders import tiny_llama_dir

SHARED = list(range(40, 78))
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 9], [11, 12, 13], [*SHARED, 5, 6, 7], list(range(20, 60)), [80] * 33]
MAX_TOKENS = 20
BUDGETS = (1, 7, 64, 4096)
TIGHT_TOKENS = 96  # KV for the longest request (61 tokens) and half of another one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def answers(model: str, fork: bool = False, times: int = 1, **options) -> tuple[list[list[int]], LLM]:
    """Greedy tokens of all prompts, the last of so many times. With fork, each prompt has three outputs, drawn with
    top_k=1."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    if fork:
        params = SamplingParams(n=3, top_k=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm = LLM(model, dtype="float32", **{"num_gpu_blocks_override": 400, **options})
    watch_blocks(llm)
    for _ in range(times):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for output in outputs:
        assert len({tuple(each.token_ids) for each in output.outputs}) == 1, "greedy siblings went apart"
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.runner.num_blocks - 1
    llm.engine.scheduler.check()
    return [output.outputs[0].token_ids for output in outputs], llm


def watch_blocks(llm: LLM) -> None:
    """Check who owns which block before every step is scheduled."""
    scheduler: Any = llm.engine.scheduler
    schedule = scheduler.schedule

    def checked() -> SchedulerOutput:
        scheduler.check()
        return schedule()

    scheduler.schedule = checked


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


@pytest.mark.parametrize("policy", ["fifo", "lfu", "value"])
@pytest.mark.parametrize("budget", (7, 64))
def test_eviction_policies(model: str, plain: list[list[int]], budget: int, policy: str) -> None:
    """In the smallest pool: what a policy gives up is computed again, and comes out the same."""
    size = TIGHT_TOKENS // 4 + 1
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "block_size": 4, "num_gpu_blocks_override": size}
    tokens, llm = answers(model, eviction_policy=policy, **options)
    assert tokens == plain
    assert type(llm.engine.scheduler.blocks.pool.policy).__name__.lower() == policy


@pytest.mark.parametrize(
    ("in_flight", "swap", "budget", "caching", "tight", "fork"),
    [
        (in_flight, swap, *rest)
        for in_flight, swap in ((True, 0), (False, 1 << 20), (True, 1 << 20), (True, 1 << 13))
        for rest in itertools.product((7, 64), (True, False), (True, False), (True, False))
    ],
)
def test_a_step_in_flight_and_swap(
    model: str, plain: list[list[int]], in_flight: bool, swap: int, budget: int, caching: bool, tight: bool, fork: bool
) -> None:
    """A host of 8 KiB holds 8 blocks of 4 tokens, less than a longest request: some must be computed again."""
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "block_size": 4, "enable_prefix_caching": caching}
    if tight:
        options["num_gpu_blocks_override"] = TIGHT_TOKENS // 4 + 1
    if swap:
        options |= {"preemption_mode": "swap", "swap_space_bytes": swap}
    tokens, llm = answers(model, fork, async_scheduling=in_flight, **options)
    assert tokens == plain
    stats = llm.engine.scheduler.stats
    if tight and budget >= 64:
        assert stats.num_preemptions > 0
        if swap:
            assert stats.num_swapped_out_blocks >= stats.num_swapped_in_blocks > 0
            assert (stats.num_swap_fallbacks > 0) == (swap == 1 << 13)


@pytest.mark.parametrize(
    ("in_flight", "swap", "budget", "fork", "admission"),
    [
        *itertools.product((True, False), (0, 1 << 20), (7, 64), (True, False), ("always",)),
        *itertools.product((True, False), (0,), (64,), (False,), ("second_sight", "value")),
    ],
)
def test_a_host_tier(
    model: str, plain: list[list[int]], in_flight: bool, swap: int, budget: int, fork: bool, admission: str
) -> None:
    """All prompts a second time, when the smallest pool has given them up; at a price at which fetching always pays."""
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "block_size": 4, "host_cache_bytes": 1 << 20}
    options |= {"host_cache_admission": admission, "host_link_bytes_per_s": 1e12, "prefill_flops_per_s": 1e6}
    if swap:
        options |= {"preemption_mode": "swap", "swap_space_bytes": swap}
    tight = TIGHT_TOKENS // 4 + 1
    tokens, llm = answers(model, fork, 2, async_scheduling=in_flight, num_gpu_blocks_override=tight, **options)
    assert tokens == plain
    assert llm.engine.scheduler.stats.host_hit_tokens > 0


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
        {"async_scheduling": True, "batching": "fixed", "max_num_seqs": 3},
        {"async_scheduling": True, "admission": "reserve", "num_gpu_blocks_override": 12},
        {"async_scheduling": True, "scheduling_policy": "priority", "num_gpu_blocks_override": 8},
        {"async_scheduling": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"async_scheduling": True, "max_num_seqs": 1},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_other_switches(model: str, plain: list[list[int]], options: dict) -> None:
    tokens, llm = answers(model, **options)
    assert tokens == plain
    if options.get("admission") == "reserve":
        assert llm.engine.scheduler.stats.num_preemptions == 0
