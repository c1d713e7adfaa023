"""The loop: the book's example, an oracle without a scheduler, and what must hold in every run."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import BOOK_STEP, FittedStep
from mini_engine.errors import ConfigError, PoolTooSmall, RequestError
from mini_engine.simulator import (
    Request,
    Simulator,
    Timeline,
    book_policies,
    book_requests,
    poisson_arrivals,
    request_list,
    simulate,
)
from mini_engine.simulator.cost import StepWork
from tests.simulator.helpers import by_hand, config

SECOND = FittedStep(1.0, 0.0, 0.0)
"""Every round takes a second."""


@pytest.mark.parametrize("policy, total, gap", [  # book 8.2.2; figures fixed_*, continuous_*, chunked_*
    ("fixed", 870.5, 26.3),
    ("continuous", 765.6, 376.0),
    ("chunked", 844.3, 132.6),
])  # fmt: skip
def test_the_books_four_requests(policy, total, gap):
    timeline = simulate(book_requests(), book_policies()[policy], BOOK_STEP)
    assert timeline.duration * 1e3 == pytest.approx(total, abs=0.05)
    assert timeline.longest_gap * 1e3 == pytest.approx(gap, abs=0.05)


def test_the_books_chunks():
    timeline = simulate(book_requests(), book_policies()["chunked"], BOOK_STEP)
    parts = [[tuple(chunk) for chunk in round_.chunks] for round_ in timeline.rounds]
    assert parts[:6] == [
        [(0, 0, 2048), (1, 0, 2048)],
        [(0, 2048, 1), (1, 2048, 1)],
        [(0, 2049, 1), (2, 0, 2048)],
        [(0, 2050, 1), (2, 2048, 2048)],
        [(0, 2051, 1), (2, 4096, 2048)],
        [(0, 2052, 1), (2, 6144, 2048)],
    ]


lengths = st.tuples(st.integers(0, 300), st.integers(1, 60), st.integers(1, 6))


@given(st.lists(lengths, min_size=1, max_size=8), st.integers(1, 3), st.booleans())
def test_token_times_are_those_worked_out_by_hand(table, seats, fixed):
    requests = request_list(table)
    batching = "fixed" if fixed else "continuous"
    timeline = simulate(requests, config(max_num_seqs=seats, batching=batching), FittedStep(5e-3, 1e-3, 1e-5))
    expected = by_hand(requests, seats, fixed, lambda tokens, pairs: 5e-3 + 1e-3 * tokens + 1e-5 * pairs)
    for record, times in zip(timeline.requests, expected, strict=True):
        assert record.metrics.token_times == pytest.approx(times)


WORKLOADS = {
    "chunks": (
        poisson_arrivals(40, 20.0, [300, 40, 1000], [5, 30, 1], seed=3),
        config(max_num_seqs=8, max_num_batched_tokens=256, long_prefill_token_threshold=100),
    ),
    "tight pool": (
        poisson_arrivals(30, 50.0, [60, 120], [40, 60], seed=4),
        config(num_blocks=40, max_num_batched_tokens=128),
    ),
    "reserve": (
        poisson_arrivals(30, 50.0, [60, 120], [40, 60], seed=4),
        config(num_blocks=40, max_num_batched_tokens=128, admission="reserve"),
    ),
    "shared prefixes": (
        [Request(f"r{i}", i * 0.02, 200, 10, (1, 2, 10 + i), 64) for i in range(20)],
        config(enable_prefix_caching=True, num_blocks=200),
    ),
}


def run(name: str, keep_chunks: bool = True) -> Timeline:
    requests, settings = WORKLOADS[name]
    return simulate(requests, settings, FittedStep(5e-3, 50e-6, 1e-8), keep_chunks=keep_chunks)


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_happens_before_its_cause(name):
    timeline = run(name)
    for record in timeline.requests:
        metrics, request = record.metrics, record.request
        assert len(metrics.token_times) == request.num_output_tokens
        assert metrics.scheduled is not None and metrics.finished == metrics.token_times[-1]
        times = [request.arrival, metrics.scheduled, *metrics.token_times]
        assert times == sorted(times) and len(set(metrics.token_times)) == len(metrics.token_times)
        assert metrics.ttft is not None and metrics.ttft + sum(metrics.itl) == pytest.approx(
            metrics.finished - request.arrival
        )
    for before, after in zip(timeline.rounds, timeline.rounds[1:], strict=False):
        assert before.start < before.end <= after.start
    starts = {chunk.request: round_.start for round_ in reversed(timeline.rounds) for chunk in round_.chunks}
    assert starts == {record.index: record.metrics.scheduled for record in timeline.requests}


@pytest.mark.parametrize("name", ["chunks", "reserve", "shared prefixes"])
def test_every_token_is_computed_once(name):
    timeline = run(name)
    computed: Counter[tuple[int, int]] = Counter()
    for round_ in timeline.rounds:
        assert round_.work.num_tokens == sum(chunk.num_tokens for chunk in round_.chunks)
        for chunk in round_.chunks:
            computed.update((chunk.request, chunk.start + i) for i in range(chunk.num_tokens))
    expected = {
        (record.index, position)
        for record in timeline.requests
        for position in range(
            record.metrics.num_cached_tokens, record.request.num_prompt_tokens + record.request.num_output_tokens - 1
        )
    }
    assert set(computed) == expected and set(computed.values()) == {1}
    assert timeline.stats.num_scheduled_tokens == len(expected)
    assert timeline.stats.num_preemptions == 0


def test_a_prefix_computed_by_one_is_found_by_the_others():
    cached = [record.metrics.num_cached_tokens for record in run("shared prefixes").requests]
    assert cached == [0] + [128] * 19


def test_a_tight_pool_preempts_and_computes_again():
    timeline = run("tight pool")
    preempted = sum(record.metrics.num_preemptions for record in timeline.requests)
    assert preempted == timeline.stats.num_preemptions == sum(round_.num_preempted for round_ in timeline.rounds) > 0
    asked = sum(record.request.num_prompt_tokens + record.request.num_output_tokens - 1 for record in timeline.requests)
    assert timeline.stats.num_scheduled_tokens > asked
    assert max(round_.used_blocks for round_ in timeline.rounds) == timeline.stats.peak_used_blocks <= 39


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_repeats_itself_and_does_not_depend_on_what_is_kept(name):
    first, second, lean = run(name), run(name), run(name, keep_chunks=False)
    assert first.rounds == second.rounds
    assert [round_._replace(chunks=()) for round_ in first.rounds] == lean.rounds
    assert [record.metrics for record in first.requests] == [record.metrics for record in lean.requests]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_block_manager_is_sound_after_every_round(name):
    requests, settings = WORKLOADS[name]
    simulator = Simulator(requests, settings, FittedStep(5e-3, 50e-6, 0.0))
    while simulator.has_unfinished():
        simulator.step()
        simulator.scheduler.blocks.check(simulator.scheduler.running)
    assert simulator.scheduler.blocks.num_free_blocks == settings.num_blocks - 1


def test_the_clock_jumps_over_idle_time_and_never_back():
    timeline = simulate(request_list([(100, 10, 1), (5000, 10, 1), (5000, 10, 1)]), config(), SECOND)
    assert [round_.start for round_ in timeline.rounds] == pytest.approx([0.1, 5.0])
    assert [round_.end for round_ in timeline.rounds] == pytest.approx([1.1, 6.0])
    assert timeline.rounds[1].num_running == 2


def test_an_arrival_during_a_round_waits_for_its_end():
    timeline = simulate(request_list([(0, 10, 2), (1, 10, 1)]), config(), SECOND)
    assert timeline.requests[1].metrics.scheduled == 1.0
    assert timeline.requests[1].metrics.queue_time == pytest.approx(0.999)


def test_requests_may_come_in_any_order():
    table = [(0, 30, 3), (10, 20, 2), (20, 10, 1)]
    forward = simulate(request_list(table), config(), BOOK_STEP)
    backward = simulate(request_list(table[::-1]), config(), BOOK_STEP)
    times = [record.metrics.token_times for record in forward.requests]
    assert times == [record.metrics.token_times for record in reversed(backward.requests)]


def test_nothing_to_do():
    timeline = simulate([], config(), BOOK_STEP)
    assert (timeline.duration, timeline.rounds, timeline.longest_gap) == (0.0, [], 0.0)


@pytest.mark.parametrize(
    "table, settings, error, says",
    [
        ([(0, 10, 1), (0, 50, 60)], {"max_model_len": 100}, RequestError, r"request 1 \(r1\): 50 prompt \+ 60 output"),
        ([(0, 90, 10)], {"num_blocks": 6}, PoolTooSmall, r"request 0 \(r0\): the request needs 7 blocks"),
    ],
)
def test_a_request_that_can_never_be_served_is_named_before_anything_runs(table, settings, error, says):
    def cost(work: StepWork) -> float:
        raise AssertionError("a round was run")

    with pytest.raises(error, match=says):
        simulate(request_list(table), config(**settings), cost)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_cost_model_that_gives_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="cost model"):
        simulate(request_list([(0, 1, 1)]), config(), lambda work: seconds)
