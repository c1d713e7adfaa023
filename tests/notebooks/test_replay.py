"""A replay on the real engine and a simulation of it: the same scheduler, so the same rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coursekit.replay import measured_steps, noticed, replay
from mini_engine import EngineConfig, LLMEngine
from mini_engine.analysis import BOOK_STEP
from mini_engine.config import SchedulerConfig
from mini_engine.errors import RequestError
from mini_engine.simulator import Request, Timeline, request_list, simulate
from tests.builders import tiny_llama_dir

CONFIG = SchedulerConfig(
    max_num_seqs=3, max_num_batched_tokens=24, enable_prefix_caching=False, max_model_len=128, num_blocks=64
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


class Clock:
    """A clock that moves on by a millisecond whenever it is read: every round takes some, and no time is real."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def engine(model: str) -> LLMEngine:
    return LLMEngine(EngineConfig(model, dtype="float32", num_gpu_blocks_override=64), Clock())


def chunks(timeline: Timeline) -> list[tuple[tuple[int, int, int], ...]]:
    return [tuple(tuple(chunk) for chunk in round_.chunks) for round_ in timeline.rounds]  # type: ignore[misc]


@pytest.mark.parametrize("batching", ["continuous", "fixed"])
def test_the_rounds_are_those_of_the_simulation(model: str, batching: str) -> None:
    requests = request_list([(0, 40, 6), (0, 5, 2), (0, 30, 4), (0, 1, 3)])
    config = replace(CONFIG, batching=batching)  # type: ignore[arg-type]
    played, simulated = replay(engine(model), requests, config), simulate(requests, config, BOOK_STEP)
    assert chunks(played) == chunks(simulated)
    assert [round_.work for round_ in played.rounds] == [round_.work for round_ in simulated.rounds]
    assert [round_.used_blocks for round_ in played.rounds] == [round_.used_blocks for round_ in simulated.rounds]
    assert [len(record.metrics.token_times) for record in played.requests] == [6, 2, 4, 3]


def test_times_are_those_of_the_clock(model: str) -> None:
    requests = request_list([(0, 8, 3), (4, 8, 3)])  # the second comes while the first round runs
    played = replay(engine(model), requests, CONFIG)
    first, second = (record.metrics for record in played.requests)
    ends = [round_.end for round_ in played.rounds]
    assert first.token_times == ends[:3]
    assert second.arrival == 0.004 and second.scheduled is not None
    assert second.scheduled >= noticed(played)[1] >= second.arrival
    starts = [round_.start for round_ in played.rounds]
    assert noticed(played)[1] in starts and second.scheduled in starts
    assert [step.seconds for step in measured_steps(played)] == [round_.end - round_.start for round_ in played.rounds]


def test_what_cannot_be_served_is_refused_before_anything_runs(model: str) -> None:
    tiny = engine(model)
    with pytest.raises(RequestError, match="max_model_len 128"):
        replay(tiny, [Request("long", 0.0, 200, 4)], CONFIG)
    assert not tiny.scheduler.has_unfinished()
    with pytest.raises(ValueError, match="config has 65 blocks of 16, the engine 64 of 16"):
        replay(tiny, [], replace(CONFIG, num_blocks=65))
