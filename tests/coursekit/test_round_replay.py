"""Lab 8-4: the twelve rounds, counted without a model and computed with a tiny one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from coursekit.round_replay import in_common, replay_rounds, round_prompts
from mini_engine.config import SchedulerConfig
from mini_engine.simulator.twelve_rounds import PRESSURE_PROMPT, ROUND_PROMPTS, common_prefixes
from tests.builders import tiny_llama_dir

# Public record of experiment 8-4, pools of 6 and 1 GiB of Qwen3-8B.
BOOK_HITS = [0, 192, 304, 656, 880, 1216, 1440, 1792, 2000, 2352, 2560, 2912]
STREAM = range(5000)


def config(num_blocks: int, **more) -> SchedulerConfig:
    return SchedulerConfig(max_model_len=8192, num_blocks=num_blocks, **more)


def test_prompts_have_the_lengths_and_common_prefixes_of_the_record() -> None:
    prompts = round_prompts(STREAM)
    assert [len(prompt) for prompt in prompts] == list(ROUND_PROMPTS)
    for before, after, common in zip(prompts, prompts[1:], common_prefixes()[1:], strict=False):
        assert after[:common] == before[:common] and after[common] != before[common]
    assert in_common(prompts) == list(common_prefixes())


@pytest.mark.parametrize("stream", [range(3000), [7] * 5000])
def test_a_text_that_does_not_serve_is_refused(stream) -> None:
    with pytest.raises(ValueError, match="is too short"):
        round_prompts(stream)


def test_a_text_that_repeats_itself_has_no_more_in_common() -> None:
    stream = [i // 9 % 50 for i in range(5000)]  # nine times the same token: the next one is often the replaced one
    assert in_common(round_prompts(stream)) == list(common_prefixes())


@pytest.mark.parametrize(
    "num_blocks, pressure, hits",
    [(2730, 3, BOOK_HITS), (2730, 0, BOOK_HITS), (455, 3, [0] * 12), (455, 0, BOOK_HITS)],
)
def test_hit_for_hit_the_record(num_blocks: int, pressure: int, hits: list[int]) -> None:
    seen = replay_rounds(round_prompts(STREAM), config(num_blocks), pressure=pressure)
    assert [one.cached for one in seen] == hits
    assert all(one.cached + one.computed == one.prompt for one in seen)
    assert {one.outputs for one in seen} == {None}


def test_without_a_cache_nothing_is_found() -> None:
    seen = replay_rounds(round_prompts(STREAM), config(2730, enable_prefix_caching=False), pressure=0)
    assert sum(one.computed for one in seen) == sum(ROUND_PROMPTS) == 19_556


def test_one_neighbour_more_or_less() -> None:
    """A pressure request takes 250 blocks; a round survives among them only if the pool is larger."""
    blocks = -(-PRESSURE_PROMPT // 16)
    prompts = round_prompts(STREAM)
    for pressure in (1, 2):
        enough = pressure * blocks + BOOK_HITS[-1] // 16 + 1
        totals = [sum(one.cached for one in replay_rounds(prompts, config(n), pressure=pressure))
                  for n in (enough, enough - 1)]  # fmt: skip
        assert totals[0] == sum(BOOK_HITS) > totals[1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    from mini_engine import EngineConfig, LLMEngine

    model = str(tiny_llama_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=4096))
    return LLMEngine(EngineConfig(model, dtype="float32", num_gpu_blocks_override=300))


def small_prompts(engine) -> list[list[int]]:
    """Five growing prompts of a tiny vocabulary."""
    vocabulary = engine.model_config.vocab_size
    stream = [(5 * i + i * i // 7) % vocabulary for i in range(400)]
    prompts: list[list[int]] = []
    used = 0
    for length in (40, 70, 130, 180, 260):
        kept = prompts[-1][:-4] if prompts else []
        prompts.append(kept + stream[used : used + length - len(kept)])
        used += length - len(kept)
    return prompts


def test_the_model_gives_the_same_tokens_whether_found_or_not(engine) -> None:
    prompts = small_prompts(engine)
    on, off = config(300), config(300, enable_prefix_caching=False)
    warm, cold = (replay_rounds(prompts, one, engine, pressure=0) for one in (on, off))
    some = replay_rounds(prompts, off, engine, 0, computed=(1, 3))
    assert sum(one.cached for one in warm) > 0 == sum(one.cached for one in cold)
    assert [one.outputs for one in warm] == [one.outputs for one in cold]
    assert [one.outputs for one in some] == [None, cold[1].outputs, None, cold[3].outputs, None]
    assert all(one.ttft_s is not None and len(one.outputs or ()) == 8 for one in cold)
    counted = replay_rounds(prompts, on, pressure=0)
    assert [one.cached for one in warm] == [one.cached for one in counted]


def test_pressure_that_is_not_computed_takes_its_blocks_all_the_same(engine) -> None:
    prompts = small_prompts(engine)
    asked: set[str] = set()
    execute = engine.runner.execute

    def watched(output):
        asked.update(item.seq.request_id for item in output.scheduled)
        return execute(output)

    engine.runner.execute = watched
    try:
        seen = replay_rounds(prompts, config(256), engine, pressure=1)
    finally:
        engine.runner.execute = execute
    # 250 of 255 blocks are given to others between two rounds, so the first 5 of the found blocks survive at most.
    assert [one.cached for one in seen] == [min(common // 16, 5) * 16 for common in in_common(prompts)]
    assert asked == {f"round{i}" for i in range(5)}


def test_a_round_that_would_read_what_nobody_computed_is_refused(engine) -> None:
    with pytest.raises(ValueError, match="round 1 found 32 tokens, though a round before it was not computed"):
        replay_rounds(small_prompts(engine), config(300), engine, pressure=0, computed=(1,))


def test_an_engine_with_another_pool_is_refused(engine) -> None:
    with pytest.raises(ValueError, match="config has 301 blocks of 16, the engine 300 of 16"):
        replay_rounds(small_prompts(engine), config(301), engine)


def test_neighbours_share_nothing() -> None:
    from coursekit.round_replay import _unrelated

    prompts = [_unrelated(number, 49_000) for number in range(1, 34)]
    assert all(first[0] != second[0] and len(first) == PRESSURE_PROMPT for first, second in pairwise(prompts))
