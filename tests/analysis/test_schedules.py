"""Fitted step, rounds priced by hand, chunks and graph shapes, against brute force."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    BOOK_STEP,
    AnalysisError,
    Chunk,
    FittedStep,
    PlannedRequest,
    capture_break_even,
    causal_pairs,
    fit_step,
    idle_row_steps,
    largest_chunk,
    padded_rows,
    padding,
    price_schedule,
    repeated_read_bytes,
    split_prompt,
    staircase,
)

CHUNKS = st.lists(st.builds(Chunk, st.integers(1, 50), st.integers(0, 200)), max_size=6)
SHAPES = st.lists(st.integers(1, 64), max_size=5)
STEPS = st.builds(
    FittedStep, st.floats(0, 0.1), st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-6), SHAPES.map(lambda s: tuple(s))
)


def brute_padded(rows: int, shapes: Sequence[int]) -> int:
    """Walk up from `rows` until a captured shape is met; run eagerly if none is."""
    for size in range(rows, max(shapes, default=0) + 1):
        if size in shapes:
            return size
    return rows


@given(st.integers(1, 80), SHAPES)
def test_padding(rows: int, shapes: list[int]) -> None:
    assert padded_rows(rows, shapes) == brute_padded(rows, shapes)
    assert padding(rows, shapes) == brute_padded(rows, shapes) - rows


def test_a_round_without_rows_pads_nothing() -> None:
    assert padded_rows(0, (16, 32)) == 0


def test_staircase_of_the_books_shapes() -> None:
    """Book 8.2.4: 18 → 17 rows saves nothing, 17 → 16 does."""
    steps = dict(staircase(40, (16, 32)))
    assert (steps[18], steps[17], steps[16], steps[1]) == (32, 32, 16, 16)
    assert (steps[32], steps[33], steps[40]) == (32, 33, 40)


@pytest.mark.parametrize(
    "capture_s, rows_saved, row_s, rounds", [(0.5, 15, 30e-6, 1112), (1.0, 1, 0.5, 2), (0.5, 0, 30e-6, None)]
)
def test_when_another_graph_has_paid(capture_s: float, rows_saved: int, row_s: float, rounds: int | None) -> None:
    assert capture_break_even(capture_s, rows_saved, row_s) == rounds


@given(STEPS, CHUNKS)
def test_price_of_a_round(step: FittedStep, work: list[Chunk]) -> None:
    rows = sum(chunk.new for chunk in work)
    seconds = step.base_s + step.per_token_s * (brute_padded(rows, step.shapes) if rows else 0)
    for chunk in work:
        for position in range(chunk.history, chunk.history + chunk.new):
            seconds += (position + 1) * step.per_pair_s
    assert step.seconds(work) == pytest.approx(seconds)


ROUNDS = [[Chunk(1, 100)], [Chunk(1, 4000)], [Chunk(512)], [Chunk(2048)], [Chunk(512, 7680)], [Chunk(1, 9)] * 16]


@given(st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-7))
def test_a_fit_finds_what_the_rounds_were_made_with(base: float, per_token: float, per_pair: float) -> None:
    made = FittedStep(base, per_token, per_pair)
    fitted = fit_step([(work, made.seconds(work)) for work in ROUNDS])
    for work in [*ROUNDS, [Chunk(300, 5000), Chunk(1, 77)]]:
        assert fitted.seconds(work) == pytest.approx(made.seconds(work), rel=1e-6, abs=1e-9)


def test_a_fit_never_gives_time_back() -> None:
    """Rounds that get faster with their pairs: the negative part is dropped and the others are fitted again."""
    noise = [(work, 0.02 + 1e-5 * sum(c.new for c in work) - 1e-10 * sum(c.pairs for c in work)) for work in ROUNDS]
    fitted = fit_step(noise)
    assert fitted.per_pair_s == 0
    assert fitted.base_s == pytest.approx(0.02, rel=0.01)


def test_a_fit_needs_rounds_that_differ() -> None:
    with pytest.raises(AnalysisError, match="2 measured rounds do not tell base, token and pair apart"):
        fit_step([([Chunk(1, 10)], 0.01), ([Chunk(1, 10)], 0.01)])


@given(st.integers(1, 3000), st.integers(1, 700), st.integers(0, 100))
def test_chunks_of_a_prompt_cover_it_once(prompt: int, chunk: int, history: int) -> None:
    parts = split_prompt(prompt, chunk, history)
    positions = [position for part in parts for position in range(part.history, part.history + part.new)]
    assert positions == list(range(history, history + prompt))
    assert all(part.new == chunk for part in parts[:-1]) and parts[-1].new <= chunk
    assert sum(part.pairs for part in parts) == causal_pairs(prompt, history)
    assert repeated_read_bytes(7, prompt, chunk) == sum(7 for _ in parts)


@given(STEPS, st.floats(1e-4, 0.2), st.integers(0, 300), st.lists(st.integers(0, 50), max_size=3), st.integers(0, 120))
def test_largest_chunk_by_trying_all(
    step: FittedStep, gap_s: float, history: int, contexts: list[int], limit: int
) -> None:
    decodes = [Chunk(1, context) for context in contexts]
    if decodes and step.seconds(decodes) > gap_s:
        with pytest.raises(AnalysisError, match="decodes alone take"):
            largest_chunk(step.seconds, gap_s, history, contexts, limit)
        return
    fitting = [size for size in range(1, limit + 1) if step.seconds([*decodes, Chunk(size, history)]) <= gap_s]
    assert largest_chunk(step.seconds, gap_s, history, contexts, limit) == max(fitting, default=0)


def test_a_longer_context_leaves_a_smaller_chunk() -> None:
    """Book 8.2.4, a gap of 50 ms beside one decode at 2K: 753 tokens of a new prompt, 438 after 7680."""
    chunks = [largest_chunk(BOOK_STEP.seconds, 50e-3, history, [2048]) for history in (0, 7680)]
    assert chunks == [753, 438]


@given(st.integers(0, 2**32))
def test_random_schedules_token_by_token(seed: int) -> None:
    """Any valid schedule: time stamps are ends of rounds, one a token, and the clock never runs backwards."""
    rng = random.Random(seed)
    plans = {
        f"r{i}": PlannedRequest(rng.choice([0.0, 0.05, 3.0]), rng.randint(1, 9), rng.randint(1, 5)) for i in range(4)
    }
    left = {name: plan.prompt + plan.output - 1 for name, plan in plans.items()}
    rounds: list[dict[str, int]] = []
    while any(left.values()):
        work = {}
        for name in rng.sample(sorted(left), rng.randint(1, 4)):
            prompt_left = left[name] - (plans[name].output - 1)
            if left[name]:
                work[name] = rng.randint(1, prompt_left) if prompt_left > 0 else 1
                left[name] -= work[name]
        if work:
            rounds.append(work)
    priced = price_schedule(plans, rounds, BOOK_STEP.seconds)

    clock, done = 0.0, dict.fromkeys(plans, 0)
    stamps: dict[str, list[float]] = {name: [] for name in plans}
    for work in rounds:
        for name in work:
            clock = max(clock, plans[name].arrival_s)
        clock += 26.22e-3 + 30.4e-6 * sum(work.values())
        for name, new in work.items():
            for _ in range(new):
                done[name] += 1
                clock += 3e-9 * done[name]
        for name in work:
            if done[name] >= plans[name].prompt:
                stamps[name].append(clock)
    for name, request in priced.requests.items():
        assert request.token_times == pytest.approx(stamps[name])
        assert len(request.token_times) == plans[name].output
        assert request.finished == request.token_times[-1]
    assert priced.total_s == pytest.approx(clock)


@pytest.mark.parametrize(
    "rounds, message",
    [
        ([{"a": 5}], "round 0 computes 5 tokens of a, of which 4 are known and wanted"),
        ([{"a": 4}, {"a": 2}], "round 1 computes 2 tokens of a, of which 1 are known"),
        ([{"a": 4}, {"a": 1}, {"a": 1}, {"a": 1}], "round 3 computes 1 tokens of a, of which 0 are known"),
        ([{"a": 4}, {"a": 1}], "the schedule leaves a with 2 of 3 outputs"),
        ([{"b": 4}], "round 0 runs 'b', which is not among a"),
        ([{"a": 0}], "tokens of a in round 0 must be a whole number of at least 1, got 0"),
    ],
)
def test_impossible_schedules_are_refused(rounds: list[dict[str, int]], message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        price_schedule({"a": PlannedRequest(0.0, 4, 3)}, rounds, BOOK_STEP.seconds)


@given(st.lists(st.integers(1, 30), max_size=6))
def test_idle_rows_of_a_fixed_batch(outputs: list[int]) -> None:
    idle = 0
    for step in range(max(outputs, default=0)):
        idle += sum(1 for length in outputs if step >= length)
    assert idle_row_steps(outputs) == idle
