"""One step in flight while the next is scheduled: the same answers, and blocks that wait for the step to land."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.scheduler import SchedulerOutput
from mini_engine.sequence import SequenceStatus
from tests.builders import tiny_llama_dir
from tests.scheduling import make_scheduler, sequence, unrelated

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 50))}
OTHER = {"prompt_token_ids": list(range(60, 71))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def make(model: str, **options: Any) -> LLM:
    settings = {"block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 65, "async_scheduling": True}
    return LLM(model, dtype="float32", **{**settings, **options})


def drain(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
        llm.engine.scheduler.check()
    blocks = llm.engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_usable_blocks and not blocks.in_flight


class TestSameAnswers:
    @pytest.mark.parametrize(
        "params",
        [
            {"n": 3, "temperature": 2.0, "seed": 5},
            {"temperature": 2.0},
            {"temperature": 0, "logprobs": 3},
            {"n": 2, "temperature": 3.0, "seed": 1, "logprobs": 1},
            {"temperature": 0, "max_tokens": 1},
            {"n": 4, "temperature": 1.0, "max_tokens": 1},
        ],
        ids=str,
    )
    def test_of_every_kind(self, model: str, params: dict[str, Any]) -> None:
        settings = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, **params})
        one, other = (make(model, async_scheduling=on).generate([PROMPT, OTHER], settings) for on in (True, False))
        for mine, theirs in zip(one, other, strict=True):
            assert [vars(output) for output in mine.outputs] == [vars(output) for output in theirs.outputs]
            assert len(mine.metrics.token_times) == len(theirs.metrics.token_times)

    def test_when_a_stop_ends_it(self, model: str) -> None:
        """The token behind the last one is computed in vain, and nobody sees it."""
        llm = make(model)
        free = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
        for stop in ({"stop": [free.text[8:11]]}, {"stop_token_ids": [free.token_ids[4]]}):
            for least in (0, 12):
                params = SamplingParams(temperature=0, max_tokens=30, min_tokens=least, ignore_eos=True, **stop)  # type: ignore[arg-type]
                got, want = (
                    make(model, async_scheduling=on).generate(["the quick", PROMPT], params) for on in (True, False)
                )
                assert [vars(g.outputs[0]) for g in got] == [vars(w.outputs[0]) for w in want]
                assert want[0].outputs[0].finish_reason == "stop" or least

    def test_no_token_beyond_the_last_is_computed(self, model: str) -> None:
        llm = make(model, enable_prefix_caching=False)
        llm.generate([PROMPT, OTHER], GREEDY)
        assert llm.engine.scheduler.stats.num_scheduled_tokens == 30 + 11 + 2 * 11

    def test_streams(self, model: str) -> None:
        whole = make(model, async_scheduling=False).generate("the quick", GREEDY)[0].outputs[0]
        llm = make(model)
        deltas = list(llm.stream("the quick", GREEDY))
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert "".join(delta.text for delta in deltas) == whole.text
        drain(llm)


def test_an_abort_returns_at_once_and_the_blocks_follow(model: str) -> None:
    llm = make(model)
    engine, blocks = llm.engine, llm.engine.scheduler.blocks
    record = engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    used = blocks.num_usable_blocks - blocks.num_free_blocks
    engine.abort("a")
    assert record.finished and record.outputs[0].finish_reason == "abort" and used == 8
    assert blocks.num_free_blocks == blocks.num_usable_blocks - used, "the step in flight still writes there"
    assert [seq.request_id for seq in blocks.in_flight] == ["a"]
    assert not engine.reset_prefix_cache()
    engine.scheduler.check()
    assert engine.has_unfinished_requests() and engine.step() == []
    drain(llm)
    assert len(record.outputs[0].token_ids) == 1, "a token that came after the abort was handed out"


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("steps", range(5))
def test_an_abort_at_any_time(model: str, steps: int, n: int) -> None:
    """Siblings that branch off in the step in flight end too, and the other request does not notice."""
    expected = make(model).generate(OTHER, GREEDY)[0].outputs[0].token_ids
    llm = make(model, max_num_batched_tokens=16)
    kept = llm.engine.add_request("kept", OTHER, GREEDY)
    gone = llm.engine.add_request("gone", PROMPT, SamplingParams(n=n, temperature=1.0, max_tokens=50))
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort("gone")
    again = llm.engine.add_request("gone", OTHER, GREEDY)  # the name is free at once
    drain(llm)
    assert gone.finished and all(output.finish_reason == "abort" for output in gone.outputs)
    assert kept.outputs[0].token_ids == again.outputs[0].token_ids == expected


def hold_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Every step computes only when the copies of the step behind it are done: the order that does most harm.

    Returns the steps that swapped something in, as they come.
    """
    pipeline: Any = llm.engine._pipeline
    steps, start_copies, run = llm.engine.scheduler.steps, pipeline.start_copies, llm.engine.runner.run
    copied: dict[int, threading.Event] = defaultdict(threading.Event)
    swapped_in = []

    def copies_first(output: SchedulerOutput) -> None:
        start_copies(output)
        if pipeline._copies is not None:
            pipeline._copies.result()
        if output.swap_in:
            swapped_in.append(output)
        copied[output.step or steps.step + 1].set()

    def run_late(output: SchedulerOutput, batch: Any) -> Any:
        assert copied[output.step + 1].wait(60)
        return run(output, batch)

    monkeypatch.setattr(pipeline, "start_copies", copies_first)
    monkeypatch.setattr(llm.engine.runner, "run", run_late)
    return swapped_in


@pytest.mark.parametrize("premature", [True, False])
def test_a_premature_release_is_a_wrong_token(model: str, premature: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """B waits in host memory for the blocks of A. A is aborted while a step that still writes one of them is in flight.

    Given to B at once, that block is overwritten after B's own content has been copied into it.
    """
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    first, second = {"prompt_token_ids": list(range(100, 108))}, {"prompt_token_ids": list(range(60, 68))}
    expected = make(model).generate(second, params)[0].outputs[0].token_ids
    llm = make(
        model, num_gpu_blocks_override=7, enable_prefix_caching=False, preemption_mode="swap", swap_space_bytes=1 << 20
    )
    engine: Any = llm.engine
    if premature:
        monkeypatch.setattr(engine.scheduler, "_release", engine.scheduler.blocks.free)
    swapped_in = hold_back(llm, monkeypatch)
    engine.add_request("A", first, params)
    record = engine.add_request("B", second, params)
    while not engine.scheduler.stats.num_swapped_out_blocks:
        engine.step()
    assert [item.seq.request_id for item in engine._in_flight.output.scheduled] == ["A"]
    engine.abort("A")
    engine.step()
    assert len(swapped_in) == premature
    while engine.has_unfinished_requests():
        engine.step()
    assert len(swapped_in) == 1
    assert (record.outputs[0].token_ids == expected) != premature


def test_a_step_waits_for_a_slow_link(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes only when its own blocks have come back, however long that takes."""
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(first, first + 8))} for first in (100, 60)]
    expected = [output.outputs[0].token_ids for output in make(model).generate(prompts, params)]
    llm = make(
        model, num_gpu_blocks_override=7, enable_prefix_caching=False, preemption_mode="swap", swap_space_bytes=1 << 20
    )
    swap = llm.engine.runner.swap

    def late(output: SchedulerOutput) -> None:
        time.sleep(0.1)
        swap(output)

    monkeypatch.setattr(llm.engine.runner, "swap", late)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert llm.engine.scheduler.stats.num_swapped_in_blocks > 0


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_after_a_failed_step_all_is_computed_anew(
    model: str, failure: BaseException, n: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=n, temperature=1.5, seed=3, max_tokens=10, ignore_eos=True)
    expected = [[o.token_ids for o in output.outputs] for output in make(model).generate([PROMPT, OTHER], params)]
    llm = make(model, max_num_batched_tokens=24)
    engine = llm.engine
    records = [engine.add_request("a", PROMPT, params), engine.add_request("b", OTHER, params)]
    for _ in range(before):
        engine.step()

    def fail(*_: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "forward", fail)
        with pytest.raises(type(failure)):
            for _ in range(3):
                engine.step()
    engine.scheduler.check()
    assert not engine.scheduler.running and engine.scheduler.blocks.pool.cached == {}
    drain(llm)
    assert [[output.token_ids for output in record.outputs] for record in records] == expected


def test_an_interrupted_generate_leaves_nothing_behind(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(model)
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    real, count = llm.engine._collect, iter(range(100))

    def interrupt(taken: Any) -> Any:
        if next(count) == 4:
            raise KeyboardInterrupt
        return real(taken)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, OTHER], GREEDY)
    drain(llm)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


class TestScheduler:
    def test_the_next_position_is_scheduled_before_its_token_is_known(self) -> None:
        scheduler = make_scheduler(block_size=4)
        seq = sequence("r", unrelated(0, 7), 3)
        scheduler.add(seq)
        first, second = scheduler.schedule(), scheduler.schedule()
        assert [tuple(item[1:]) for item in first.scheduled + second.scheduled] == [(0, 7), (7, 1)]
        assert (seq.num_tokens, seq.num_computed_tokens, seq.num_pending_tokens) == (7, 8, 1)
        known = scheduler.blocks.pool.cached
        assert len(known) == 1, "a block whose last token is not known has no hash"
        with pytest.raises(RuntimeError, match="steps 1 and 2 are in flight"):
            scheduler.schedule()
        scheduler.update(first, [5])
        assert len(known) == 2 and seq.token_ids[-1] == 5
        third = scheduler.schedule()
        scheduler.update(second, [6])
        assert scheduler.schedule().scheduled == (), "the third token is the last and is never computed"
        scheduler.update(third, [7])
        assert seq.output_token_ids == [5, 6, 7] and seq.status is SequenceStatus.FINISHED_LENGTH
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_usable_blocks

    def test_nobody_is_preempted_while_a_step_is_in_flight(self) -> None:
        scheduler = make_scheduler(block_size=4, num_blocks=5)
        first, second = (sequence(str(i), unrelated(i, 8), 6) for i in range(2))
        scheduler.add(first)
        scheduler.add(second)
        flying = scheduler.schedule()
        ahead = scheduler.schedule()
        assert ahead.scheduled == ahead.preempted == (), "both need a fifth block"
        assert scheduler.schedule().scheduled == (), "and nothing changes until the step has landed"
        scheduler.update(flying, [1, 1])
        output = scheduler.schedule()
        assert output.preempted == (second,) and [item.seq for item in output.scheduled] == [first]

    def test_a_block_in_flight_is_neither_free_nor_owned_but_may_be_found(self) -> None:
        scheduler = make_scheduler(block_size=4)
        seq = sequence("r", unrelated(0, 9), 9)
        scheduler.add(seq)
        flying = scheduler.schedule()
        scheduler.finish(seq, SequenceStatus.FINISHED_ABORTED)
        assert scheduler.blocks.in_flight == [seq] and not scheduler.running
        scheduler.blocks.check([])
        with pytest.raises(AssertionError, match="alive and in flight"):
            scheduler.blocks.check([seq])
        again = sequence("again", unrelated(0, 9), 9)
        scheduler.add(again)
        ahead = scheduler.schedule()
        assert again.num_cached_tokens == 8 and again.block_table[:2] == seq.block_table[:2]
        scheduler.update(flying, [1])
        assert seq.block_table == [] and scheduler.blocks.in_flight == []
        scheduler.check()
        scheduler.update(ahead, [1])
