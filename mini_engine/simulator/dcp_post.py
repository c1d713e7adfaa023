"""The simulated sweep beside the table that vLLM's post prints, row by row: KV use, and throughput as ratios.

Absolute throughput is not compared, since the post does not say which tokens it counts. Beyond the concurrency where TP
has its plateau the post prints no TP row, so the ratio there is to its last one, in the simulation as in the post.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mini_engine.analysis.tables import read_table
from mini_engine.errors import EngineError
from mini_engine.simulator.dcp_serving import Load


@dataclass(frozen=True)
class Pair:
    """A figure of the simulation and of the post; None where the post prints none."""

    ours: float
    post: float | None


@dataclass(frozen=True)
class Row:
    """One concurrency. KV as shares of the pool, ratios without unit.

    tp_kv, dcp_kv: KV in use on average (the post does not say whether its are averages). unshared_kv: what DCP would
    need if no request shared a block with another; above 1 it does not fit.
    speedup: DCP over TP. growth: DCP over its own first row; tp_growth: the same of TP.
    """

    concurrency: int
    tp_kv: Pair
    dcp_kv: Pair
    unshared_kv: float
    speedup: Pair
    growth: Pair
    tp_growth: Pair


def published_table() -> dict[str, Any]:
    """The post's numbers. The lists of TP end where TP admits no more."""
    return read_table("dcp_post")["table"]


def compare(tp: Sequence[Load], dcp: Sequence[Load], reading: str = "new") -> list[Row]:
    """Two sweeps over the same concurrencies, each of which the post has. reading: see `Load.tokens_per_s_per_gpu`.

    Raises EngineError where they are not.
    """
    table = published_table()
    levels = [load.concurrency for load in dcp]
    if levels != [load.concurrency for load in tp] or not set(levels) <= set(table["concurrency"]) or not levels:
        raise EngineError(f"both sweeps must run some of the post's concurrencies, which are {table['concurrency']}")
    indices = [table["concurrency"].index(level) for level in levels]
    printed = len(table["tp_kv_percent"])
    plateau = max((row for row, i in enumerate(indices) if i < printed), default=0)
    ours = [[load.tokens_per_s_per_gpu(reading) for load in loads] for loads in (tp, dcp)]
    post = [table["tp_tokens_per_s_per_gpu"], table["dcp_tokens_per_s_per_gpu"]]
    rows = []
    for row, i in enumerate(indices):
        has_tp = i < printed
        served = dcp[row].served
        mean_length = sum(s.prompt + s.output for s in served) / len(served)
        rows.append(
            Row(
                levels[row],
                Pair(tp[row].kv_share, table["tp_kv_percent"][i] / 100 if has_tp else None),
                Pair(dcp[row].kv_share, table["dcp_kv_percent"][i] / 100),
                levels[row] * mean_length / dcp[row].cluster.num_kv_tokens,
                Pair(ours[1][row] / ours[0][min(row, plateau)], post[1][i] / post[0][min(i, printed - 1)]),
                Pair(ours[1][row] / ours[1][0], post[1][i] / post[1][indices[0]]),
                Pair(ours[0][row] / ours[0][0], post[0][i] / post[0][indices[0]] if has_tp else None),
            )
        )
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    """As a table of text, every figure as "ours (post)"."""
    head = ("in flight", "TP KV", "DCP KV", "unshared", "DCP / TP", "DCP growth", "TP growth")
    lines = [[*head]]
    for row in rows:
        kv = [f"{p.ours:.0%}" + (f" ({p.post:.0%})" if p.post is not None else "") for p in (row.tp_kv, row.dcp_kv)]
        ratios = [
            f"{p.ours:.2f}" + (f" ({p.post:.2f})" if p.post is not None else "")
            for p in (row.speedup, row.growth, row.tp_growth)
        ]
        lines.append([str(row.concurrency), *kv, f"{row.unshared_kv:.0%}", *ratios])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
