"""The host tier of a real engine: the same tokens, fewer of them computed, and copies that fail or are late."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError, PoolTooSmall
from mini_engine.scheduler import SchedulerOutput
from tests.builders import tiny_llama_dir

SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = {"prompt_token_ids": [5 + i * 7 % 300 for i in range(121)]}
OTHER = {"prompt_token_ids": [5 + i * 11 % 300 for i in range(121)]}
PRICED: dict[str, Any] = {"host_cache_bytes": 1 << 20, "host_link_bytes_per_s": 1e12, "prefill_flops_per_s": 1e6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def make(model: str, blocks: int = 32, **options: Any) -> LLM:
    """A pool that just holds one long prompt and its answer, unless more blocks are asked for."""
    settings = {"block_size": SIZE, "num_gpu_blocks_override": blocks, **options}
    return LLM(model, dtype="float32", **settings)


def test_a_returning_prompt_three_ways(model: str) -> None:
    """Tokens computed before the first one is out: one where the pool still has the prompt, one where the host
    has it, all of them where nobody has."""
    wanted = make(model).generate(LONG, GREEDY)[0].outputs[0].token_ids
    computed = {}
    for way, options in (("pool", {"blocks": 80}), ("host", PRICED), ("nobody", {})):
        llm = make(model, **options)
        for prompt in (LONG, OTHER):
            llm.generate(prompt, GREEDY)
        before = llm.engine.scheduler.stats.num_scheduled_tokens
        again = llm.generate(LONG, GREEDY)[0]
        assert again.outputs[0].token_ids == wanted
        computed[way] = llm.engine.scheduler.stats.num_scheduled_tokens - before - (GREEDY.max_tokens - 1)
        print(f"{way:8} {computed[way]:4} tokens computed, TTFT {again.metrics.ttft or 0:.4f} s")
    assert computed == {"pool": 1, "host": 1, "nobody": 121}


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("failing", ["swap", "run"])
def test_after_a_failed_step_the_tokens_are_right(
    model: str, failing: str, in_flight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies out of OTHER's step are not made, or its model fails after them."""
    wanted = [make(model).generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (LONG, OTHER)]
    llm = make(model, async_scheduling=in_flight, **PRICED)
    llm.generate(LONG, GREEDY)
    record = llm.engine.add_request("other", OTHER, GREEDY)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, failing, fail)
        with pytest.raises(RuntimeError):
            for _ in range(3):
                llm.engine.step()
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.tier is not None and llm.engine.scheduler.tier.host.used_bytes == 0
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert [record.outputs[0].token_ids, llm.generate(LONG, GREEDY)[0].outputs[0].token_ids] == wanted[::-1]
    assert llm.engine.scheduler.stats.host_hit_tokens == 0, "what was to go out was lost"
    assert llm.generate(OTHER, GREEDY)[0].outputs[0].token_ids == wanted[1]
    assert llm.engine.scheduler.stats.host_hit_tokens > 0


def test_a_slow_link_is_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tier's clock a copy has landed at once; the one that counts takes its time."""
    wanted = [make(model).generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (LONG, OTHER)]
    llm = make(model, async_scheduling=True, **PRICED)
    swap = llm.engine.runner.swap

    def late(output: SchedulerOutput) -> None:
        time.sleep(0.05)
        swap(output)

    monkeypatch.setattr(llm.engine.runner, "swap", late)
    for _ in range(2):
        got = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (LONG, OTHER)]
        assert got == wanted
    assert llm.engine.scheduler.stats.host_hit_tokens >= 240


def test_a_reset_reaches_the_host(model: str) -> None:
    llm = make(model, **PRICED)
    for prompt in (LONG, OTHER):
        llm.generate(prompt, GREEDY)
    assert llm.engine.reset_prefix_cache()
    llm.generate(LONG, GREEDY)
    assert llm.engine.scheduler.stats.host_hit_tokens == 0


def test_beside_the_slots_of_preempted_sequences(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranges of one host memory: of 2 blocks for the preempted, then of the tier's."""
    llm = make(model, preemption_mode="swap", swap_space_bytes=5000, **PRICED | {"host_cache_bytes": 7000})
    runner, tier = llm.engine.runner, llm.engine.scheduler.tier
    assert (runner.num_host_blocks, runner.num_cache_slots) == (2, 3)
    assert runner.host is not None and runner.host.nbytes == 5 * 2048 and tier is not None
    swap, slots = runner.swap, set[int]()

    def watched(output: SchedulerOutput) -> None:
        slots.update(slot for _, slot in output.swap_out)
        swap(output)

    monkeypatch.setattr(runner, "swap", watched)
    for prompt in (LONG, OTHER):
        llm.generate(prompt, GREEDY)
    assert slots == {2, 3, 4}


def test_speeds_are_measured_unless_given(model: str) -> None:
    tier = make(model, host_cache_bytes=1 << 20).engine.scheduler.tier
    assert tier is not None
    assert 1e5 < tier.host.link.bytes_per_s < 1e13 and 1e-9 < tier.host.recompute_s(100, 0) < 100
    given = make(model, **PRICED).engine.scheduler.tier
    assert given is not None and given.host.link.bytes_per_s == 1e12
    flops = 2 * 2 * (96 * (64 + 64 + 2 * 32) + 3 * 96 * 128) * 10 + 4 * 2 * 64 * 55  # 10 tokens, 55 pairs
    assert given.host.recompute_s(10, 0) == pytest.approx(flops / 1e6)


def test_measuring_leaves_nothing_behind(model: str) -> None:
    wanted = make(model).generate([LONG, OTHER], GREEDY)
    got = make(model, host_cache_bytes=1 << 20).generate([LONG, OTHER], GREEDY)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]


def test_off_costs_nothing(model: str) -> None:
    engine = make(model).engine
    assert engine.scheduler.tier is None and engine.runner.host is None
    assert engine.scheduler.blocks.pool.on_evict is None


@pytest.mark.parametrize(
    "options, says",
    [
        ({"host_cache_bytes": -1}, "host_cache_bytes .*at least 0, got -1"),
        ({"host_cache_bytes": 1 << 20, "enable_prefix_caching": False}, "nobody looks up: set enable_prefix_caching"),
        ({"host_cache_admission": "never"}, "host_cache_admission .*always, second_sight, value, got 'never'"),
        ({"host_link_bytes_per_s": 0.0}, "host_link_bytes_per_s must be a finite number above 0, .*got 0.0"),
        ({"prefill_flops_per_s": float("nan")}, "prefill_flops_per_s must be a finite number above 0, .*got nan"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**options)


def test_a_host_too_small_for_one_block(model: str) -> None:
    with pytest.raises(PoolTooSmall, match=r"host_cache_bytes 100 holds no block of 2,048 bytes \(4 tokens\)"):
        make(model, host_cache_bytes=100)
