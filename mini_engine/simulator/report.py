"""A timeline as numbers: a summary for programs, tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_engine.analysis import Objective, longest_gap, total_seconds
from mini_engine.simulator.timeline import RequestRecord, Round, Timeline, percentiles


def summary(timeline: Timeline, objective: Objective | None = None) -> dict[str, Any]:
    """Figures of a run, ready for JSON. Seconds, tokens, blocks; rates are per second of the whole duration.

    prefix_hit_rate: found tokens over the tokens of all admissions, re-admissions after a preemption among them.
    """
    stats, seconds = timeline.stats, timeline.duration
    result: dict[str, Any] = {
        "num_requests": len(timeline.requests),
        "num_rounds": len(timeline.rounds),
        "duration_s": seconds,
        "longest_gap_s": timeline.longest_gap,
        "ttft_s": percentiles(timeline.ttfts),
        "itl_s": percentiles(timeline.itls),
        "queue_s": percentiles(timeline.queue_times),
        "num_scheduled_tokens": stats.num_scheduled_tokens,
        "num_output_tokens": timeline.num_output_tokens,
        "output_tokens_per_s": timeline.num_output_tokens / seconds if seconds > 0 else 0.0,
        "prefix_hit_rate": stats.prefix_hit_tokens / stats.prefix_query_tokens if stats.prefix_query_tokens else 0.0,
        "num_preemptions": stats.num_preemptions,
        "peak_used_blocks": stats.peak_used_blocks,
        "num_usable_blocks": timeline.config.num_blocks - 1,
    }
    if objective is not None:
        result["num_good"] = timeline.num_good(objective)
        result["goodput_per_s"] = timeline.goodput(objective)
    return result


def summary_table(timeline: Timeline, objective: Objective | None = None) -> str:
    """The summary as text."""
    figures = summary(timeline, objective)
    lines = [
        f"{figures['num_requests']:,} requests in {figures['num_rounds']:,} rounds, {ms(figures['duration_s'])} ms; "
        f"{figures['output_tokens_per_s']:,.1f} output tokens/s",
        f"{figures['num_scheduled_tokens']:,} tokens computed, prefix hits {figures['prefix_hit_rate']:.1%}, "
        f"{figures['num_preemptions']:,} preemptions, at most {figures['peak_used_blocks']:,} of "
        f"{figures['num_usable_blocks']:,} blocks in use",
    ]
    if objective is not None:
        lines.append(
            f"{figures['num_good']:,} requests met the objective: goodput {figures['goodput_per_s']:.3g} requests/s"
        )
    rows = [[name, *(ms(value) for value in figures[key].values())] for name, key in _PERCENTILES if figures[key]]
    return "\n".join([*lines, "", format_table(["ms", "p50", "p90", "p95", "p99", "max"], rows)])


def request_table(timeline: Timeline, limit: int = 40) -> str:
    """One row a request, times in ms, tokens otherwise."""
    headers = ["request", "arrival", "in", "cached", "out", "queue", "TTFT", "ITL p50", "longest", "total"]
    return _limited(headers, [_request_row(record) for record in timeline.requests[:limit]], len(timeline.requests))


def round_table(timeline: Timeline, limit: int = 40) -> str:
    """One row a round, times in ms: what it computed, and what was running, waiting and held while it ran."""
    names = [record.request.request_id for record in timeline.requests]
    headers = ["round", "start", "end", "tokens", "pairs", "running", "waiting", "blocks", "work"]
    rows = [[str(i), *_round_row(round_, names)] for i, round_ in enumerate(timeline.rounds[:limit])]
    return _limited(headers, rows, len(timeline.rounds))


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first and those of words to the left, numbers to the right."""
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    words = [i == 0 or column[0] == "work" for i, column in enumerate(columns)]
    lines = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, words, strict=True)
        ).rstrip()
        for row in [headers, *rows]
    ]
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


_PERCENTILES = [("TTFT", "ttft_s"), ("ITL", "itl_s"), ("queueing", "queue_s")]


def _request_row(record: RequestRecord) -> list[str]:
    request, metrics = record.request, record.metrics
    return [
        request.request_id,
        ms(request.arrival),
        f"{request.num_prompt_tokens:,}",
        f"{metrics.num_cached_tokens:,}",
        f"{len(metrics.token_times):,}",
        ms(metrics.queue_time),
        ms(metrics.ttft),
        ms(percentiles(metrics.itl, [50]).get("p50")),
        ms(longest_gap(metrics) if metrics.itl else None),
        ms(total_seconds(metrics) if metrics.token_times else None),
    ]


def _round_row(round_: Round, names: Sequence[str]) -> list[str]:
    parts = [f"{names[chunk.request]}[{chunk.start}:{chunk.start + chunk.num_tokens}]" for chunk in round_.chunks]
    return [
        ms(round_.start),
        ms(round_.end),
        f"{round_.work.num_tokens:,}",
        f"{round_.work.num_pairs:,}",
        str(round_.num_running),
        str(round_.num_waiting),
        f"{round_.used_blocks:,}",
        " ".join(parts),
    ]


def _limited(headers: Sequence[str], rows: Sequence[Sequence[str]], total: int) -> str:
    table = format_table(headers, rows)
    return table if len(rows) == total else f"{table}\n… and {total - len(rows):,} more"
