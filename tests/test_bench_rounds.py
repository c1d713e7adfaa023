"""Rounds measured without computing their context: the right work, on blocks of its own. Seconds are not asserted."""

from __future__ import annotations

import itertools

import pytest
import torch

from mini_engine import LLM, EngineConfig, LLMEngine, SamplingParams
from mini_engine.analysis import Chunk
from mini_engine.bench.rounds import MeasuredRound, measure_rounds
from mini_engine.errors import PoolTooSmall
from mini_engine.scheduler import SchedulerOutput
from tests.builders import tiny_llama_dir

ROUNDS = [[Chunk(1, 20)] * 3, [Chunk(8), Chunk(1, 9)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama_dir(tmp_path_factory.mktemp("model")))


def test_each_round_is_timed_as_often_as_asked_and_once_to_warm_up(model: str) -> None:
    ticks = itertools.count()
    engine = LLMEngine(EngineConfig(model, block_size=4, num_gpu_blocks_override=19))
    measured = measure_rounds(engine, ROUNDS, repeats=2, clock=lambda: float(next(ticks)))
    assert [len(round_.times) for round_ in measured] == [2, 2]
    assert [round_.row for round_ in measured] == [(3, 63, 1.0), (9, 36 + 10, 1.0)]


def test_the_fastest_repeat_counts() -> None:
    assert MeasuredRound((Chunk(1),), (3.0, 1.0, 2.0)).seconds == 1.0


def test_the_model_computes_the_chunks_on_blocks_of_their_own(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine(EngineConfig(model, block_size=4, num_gpu_blocks_override=19))
    seen: list[SchedulerOutput] = []
    execute = engine.runner.execute

    def watched(output: SchedulerOutput) -> torch.Tensor:
        seen.append(output)
        return execute(output)

    monkeypatch.setattr(engine.runner, "execute", watched)
    measure_rounds(engine, ROUNDS, repeats=1)
    for output, chunks in zip(seen[:2], [ROUNDS[0], [Chunk(1, 9), Chunk(8)]], strict=True):  # decodes come first
        assert [Chunk(item.num_tokens, item.start) for item in output.scheduled] == chunks
        blocks = [block for item in output.scheduled for block in item.seq.block_table]
        assert len(set(blocks)) == len(blocks) and 0 not in blocks
        assert [len(item.seq.block_table) for item in output.scheduled] == [
            -(-(c.new + c.history) // 4) for c in chunks
        ]


def test_a_pool_too_small_is_named_with_what_it_would_take(model: str) -> None:
    engine = LLMEngine(EngineConfig(model, block_size=4, num_gpu_blocks_override=18))
    with pytest.raises(PoolTooSmall, match="needs 18 blocks of 4 tokens, the pool has 17.*at least 19"):
        measure_rounds(engine, ROUNDS)


def test_requests_in_flight_are_not_overwritten(model: str) -> None:
    engine = LLMEngine(EngineConfig(model, num_gpu_blocks_override=19))
    engine.add_request("a", {"prompt_token_ids": [3, 4, 5]})
    with pytest.raises(ValueError, match="in flight"):
        measure_rounds(engine, ROUNDS)


@pytest.mark.parametrize(("rounds", "repeats"), [([[]], 1), ([[Chunk(1)]], 0)])
def test_nothing_to_measure_is_refused(model: str, rounds: list[list[Chunk]], repeats: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_rounds(LLMEngine(EngineConfig(model, num_gpu_blocks_override=9)), rounds, repeats)


def test_the_engine_answers_as_before(model: str) -> None:
    """Prefixes it remembers are forgotten, since their values in the pool are gone."""
    llm = LLM(model, block_size=4, num_gpu_blocks_override=40)
    prompt, greedy = {"prompt_token_ids": list(range(3, 30))}, SamplingParams(temperature=0, max_tokens=6)
    before = llm.generate(prompt, greedy)[0].outputs[0].token_ids
    measure_rounds(llm.engine, ROUNDS, repeats=1)
    assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == before
