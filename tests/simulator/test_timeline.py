"""Figures made of a run, against ones worked out by hand; tables; the Chrome trace; the bench."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mini_engine.analysis import BOOK_STEP, FittedStep, Objective
from mini_engine.metrics import RequestMetrics
from mini_engine.simulator import (
    Simulator,
    Timeline,
    book_policies,
    book_requests,
    poisson_arrivals,
    request_list,
    simulate,
    summary,
)
from mini_engine.simulator.bench import cost_table, step_costs
from mini_engine.simulator.perfetto import chrome_trace, write_chrome_trace
from mini_engine.simulator.report import format_table, request_table, round_table, summary_table
from mini_engine.simulator.timeline import RequestRecord, percentiles
from tests.simulator.helpers import config

SECOND = FittedStep(1.0, 0.0, 0.0)
"""Every round takes a second."""


def timeline_of(*requests: tuple[float, list[float]]) -> Timeline:
    """A finished run, given as (arrival, token times)."""
    table = request_list([(arrival * 1e3, 10, max(len(times), 1)) for arrival, times in requests])
    records = []
    for i, (arrival, times) in enumerate(requests):
        metrics = RequestMetrics(
            arrival, scheduled=arrival + 0.5, token_times=times, finished=times[-1] if times else None
        )
        records.append(RequestRecord(i, table[i], metrics))
    return Timeline(config(), records)


def chunked() -> Timeline:
    return simulate(book_requests(), book_policies()["chunked"], BOOK_STEP)


def test_times_of_requests():
    timeline = timeline_of((1.0, [3.0, 4.0, 6.5]), (2.0, [4.0]))
    assert timeline.ttfts.tolist() == [2.0, 2.0]
    assert timeline.itls.tolist() == [1.0, 2.5]
    assert timeline.queue_times.tolist() == [0.5, 0.5]
    assert timeline.longest_gap == 2.5


@pytest.mark.parametrize(
    "objective, good",
    [
        (Objective(ttft_s=2.0), 2),
        (Objective(ttft_s=1.9), 0),
        (Objective(gap_s=2.5), 2),
        (Objective(gap_s=2.4), 1),
        (Objective(total_s=5.4), 1),
        (Objective(ttft_s=2.0, gap_s=3.0, total_s=1.9), 0),
    ],
)
def test_objectives(objective, good):
    timeline = timeline_of((1.0, [3.0, 4.0, 6.5]), (2.0, [4.0]), (3.0, []))
    assert timeline.num_good(objective) == good


def test_goodput_counts_from_the_first_arrival_to_the_end():
    timeline = simulate(
        request_list([(1000, 10, 1), (1000, 10, 3), (9000, 10, 1)]), config(), FittedStep(1.0, 0.0, 0.0)
    )
    assert (timeline.start, timeline.end) == (1.0, 10.0)
    assert timeline.goodput(Objective(total_s=2.0)) == pytest.approx(2 / 9)
    assert summary(timeline, Objective(total_s=2.0))["goodput_per_s"] == pytest.approx(2 / 9)


def test_percentiles_are_linear_between_samples():
    assert percentiles([1.0, 2.0, 3.0, 4.0], [50, 95]) == pytest.approx({"p50": 2.5, "p95": 3.85, "max": 4.0})
    assert percentiles(np.empty(0)) == {}


def test_the_summary_of_the_book_example():
    figures = summary(chunked(), Objective(gap_s=0.15))
    assert json.loads(json.dumps(figures)) == figures
    # 4 prompts, and all outputs but each one's last
    assert figures["num_scheduled_tokens"] == 2048 + 2048 + 8192 + 2048 + 8 + 2 + 2 + 4 - 4
    assert (figures["num_rounds"], figures["num_output_tokens"], figures["num_good"]) == (11, 16, 4)
    assert figures["output_tokens_per_s"] == pytest.approx(16 / 0.84425, rel=1e-4)
    # r2 holds 8192 tokens and r0 2048 + 5, then r2 one more: 513 + 129 blocks
    assert figures["peak_used_blocks"] == 642
    assert summary(simulate([], config(), BOOK_STEP))["output_tokens_per_s"] == 0


def test_tables_hold_what_they_should():
    timeline = chunked()
    line = next(line for line in request_table(timeline).splitlines() if line.startswith("r2"))
    assert line.split() == ["r2", "20.0", "8,192", "0", "2", "169.6", "624.4", "26.3", "26.3", "650.7"]
    line = next(line for line in round_table(timeline).splitlines() if line.startswith("2 "))
    assert line.split() == ["2", "189.6", "284.4", "2,049", "2,100,226", "2", "1", "641", "r0[2049:2050]", "r2[0:2048]"]
    assert "4 requests in 11 rounds, 844.3 ms" in summary_table(timeline)


def test_long_tables_are_cut_and_say_so():
    text = round_table(chunked(), limit=3)
    assert text.endswith("… and 8 more") and len(text.splitlines()) == 2 + 3 + 1


def test_columns_line_up():
    lines = format_table(["name", "n"], [["a", "1,000"], ["long name", "1"]]).splitlines()
    assert lines == ["name           n", "----------------", "a          1,000", "long name      1"]


@pytest.mark.parametrize("keep_chunks", [True, False])
def test_the_chrome_trace_is_well_formed_and_complete(tmp_path, keep_chunks):
    timeline = simulate(book_requests(), book_policies()["chunked"], BOOK_STEP, keep_chunks=keep_chunks)
    write_chrome_trace(timeline, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(timeline)
    events = trace["traceEvents"]
    kinds = {"X": {"ts", "dur", "args"}, "C": {"ts", "args"}, "M": {"args"}}
    for event in events:
        assert {"name", "ph", "pid", "tid"} | kinds[event["ph"]] == set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    rounds = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert [event["ts"] for event in rounds] == pytest.approx([round_.start * 1e6 for round_ in timeline.rounds])
    assert rounds[-1]["ts"] + rounds[-1]["dur"] == pytest.approx(844_251, abs=1)
    tracks = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2
    }
    assert tracks == {0: "r0", 1: "r1", 2: "r2", 3: "r3"}
    for record in timeline.requests:
        spans = sorted(
            (event["ts"], event["ts"] + event["dur"], event["name"])
            for event in events
            if event["ph"] == "X" and event["pid"] == 2 and event["tid"] == record.index
        )
        assert all(end <= start + 1e-3 for (_, end, _), (start, _, _) in zip(spans, spans[1:], strict=False))
        assert spans[0][0] == pytest.approx(record.request.arrival * 1e6)
        assert spans[-1][1] == pytest.approx(record.metrics.finished * 1e6)
        prefills = [end for _, end, name in spans if name == "prefill"]
        assert prefills[-1] == pytest.approx(record.metrics.token_times[0] * 1e6)


@pytest.mark.parametrize("num_parts", [4, 1_000_000])  # the second: every round by itself
def test_the_bench_covers_every_round_once(num_parts):
    ticks = iter(range(10_000))
    simulator = Simulator(poisson_arrivals(30, 5.0, 100, 20), config(), BOOK_STEP, keep_chunks=False)
    parts = step_costs(simulator, parts=num_parts, clock=lambda: float(next(ticks)))
    rounds = simulator.timeline.rounds
    assert sum(part.num_rounds for part in parts) == len(rounds)
    assert [part.first_round for part in parts] == sorted({part.first_round for part in parts})
    assert {part.step_us for part in parts} == {1e6}  # the clock ticks a second a round
    for part in parts:
        begun = rounds[part.first_round].start
        finished = sum(record.metrics.finished <= begun for record in simulator.timeline.requests)
        assert part.num_finished == finished
        assert part.sequence_us == pytest.approx(part.step_us / part.mean_running)
    assert len(parts) == min(num_parts, len(rounds))
    assert len(cost_table(parts).splitlines()) == 2 + len(parts)


def test_a_bench_of_nothing():
    assert step_costs(Simulator([], config(), BOOK_STEP)) == []
