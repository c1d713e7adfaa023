"""A timeline as a Chrome trace: open the file in ui.perfetto.dev or chrome://tracing.

    process "engine"     a slice for each round; counters for running, waiting, KV blocks in use, tokens a round
    process "requests"   a track for each request: waiting, then prefill and decode, or one slice a round where the
                         run kept its chunks

Source: the Trace Event Format (JSON object format; "X" complete events, "C" counters, "M" metadata; µs).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_engine.simulator.timeline import RequestRecord, Timeline

ENGINE, REQUESTS = 1, 2
Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a dictionary that JSON can hold. Times in µs on the virtual clock."""
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(timeline), *_rounds(timeline), *_requests(timeline)]}


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace as a JSON file."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")


def _names(timeline: Timeline) -> Iterator[Event]:
    yield _metadata("process_name", ENGINE, 0, "engine")
    yield _metadata("thread_name", ENGINE, 0, "rounds")
    yield _metadata("process_name", REQUESTS, 0, "requests")
    for record in timeline.requests:
        yield _metadata("thread_name", REQUESTS, record.index, record.request.request_id)


def _rounds(timeline: Timeline) -> Iterator[Event]:
    for i, round_ in enumerate(timeline.rounds):
        work = round_.work
        args = {"tokens": work.num_tokens, "causal pairs": work.num_pairs, "preempted": round_.num_preempted}
        yield _slice(f"round {i}", ENGINE, 0, round_.start, round_.end, args)
        yield _counter("sequences", round_.start, {"running": round_.num_running, "waiting": round_.num_waiting})
        yield _counter("KV blocks in use", round_.start, {"blocks": round_.used_blocks})
        yield _counter("tokens a round", round_.start, {"tokens": work.num_tokens})
    if timeline.rounds:
        yield _counter("sequences", timeline.end, {"running": 0, "waiting": 0})
        yield _counter("KV blocks in use", timeline.end, {"blocks": 0})
        yield _counter("tokens a round", timeline.end, {"tokens": 0})


def _requests(timeline: Timeline) -> Iterator[Event]:
    for record in timeline.requests:
        metrics = record.metrics
        if metrics.scheduled is None:
            continue
        if metrics.scheduled > metrics.arrival:
            yield _slice("waiting", REQUESTS, record.index, metrics.arrival, metrics.scheduled, {})
        if not timeline.rounds[0].chunks:
            yield from _phases(record, metrics.scheduled)
    for round_ in timeline.rounds:
        for chunk in round_.chunks:
            prefill = chunk.start < timeline.requests[chunk.request].request.num_prompt_tokens
            args = {"start": chunk.start, "tokens": chunk.num_tokens}
            yield _slice("prefill" if prefill else "decode", REQUESTS, chunk.request, round_.start, round_.end, args)


def _phases(record: RequestRecord, scheduled: float) -> Iterator[Event]:
    times, request = record.metrics.token_times, record.request
    if not times:
        return
    args = {"prompt": request.num_prompt_tokens, "cached": record.metrics.num_cached_tokens}
    yield _slice("prefill", REQUESTS, record.index, scheduled, times[0], args)
    if len(times) > 1:
        yield _slice("decode", REQUESTS, record.index, times[0], times[-1], {"tokens": len(times) - 1})


def _slice(name: str, process: int, thread: int, start: float, end: float, args: Event) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": args,
    }


def _counter(name: str, time: float, values: dict[str, int]) -> Event:
    return {"name": name, "ph": "C", "pid": ENGINE, "tid": 0, "ts": time * 1e6, "args": values}


def _metadata(name: str, process: int, thread: int, value: str) -> Event:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": value}}
