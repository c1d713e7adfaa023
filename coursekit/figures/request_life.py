"""The life of requests: who sits in which row of the batch, who owns which block, and the two counters.

Works on anything with the scheduler's attributes: `running`, and on each sequence `request_id`, `token_ids`,
`num_computed_tokens`, `block_table`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One sequence of a step's batch: its two counters before the step's token was drawn, and its blocks."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_scheduled: int
    block_table: tuple[int, ...]


def snapshot(output: Any) -> list[Row]:
    """The rows of a scheduler output, taken before the step runs."""
    return [
        Row(
            item.seq.request_id,
            len(item.seq.token_ids),
            item.start + item.num_tokens,
            item.num_tokens,
            tuple(item.seq.block_table),
        )
        for item in output.scheduled
    ]


def request_life(steps: Seq[Seq[Row]], num_blocks: int, follow: str) -> Figure:
    """Three pictures over the same steps: rows of the batch, blocks of the pool, counters of request `follow`."""
    figure = new_figure(9, 7.2)
    rows, blocks, counters = figure.subplots(3, 1, sharex=True, height_ratios=[1.1, 2.2, 1.8])
    names = list(dict.fromkeys(row.request_id for step in steps for row in step))
    color = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    _draw_rows(rows, steps, color)
    _draw_blocks(blocks, steps, num_blocks, color)
    _draw_counters(counters, steps, follow, color[follow])
    counters.set_xlim(-0.5, len(steps) - 0.5)
    counters.set_xlabel("step")
    return figure


def _draw_rows(axes: Any, steps: Seq[Seq[Row]], color: dict[str, str]) -> None:
    height = max(len(step) for step in steps)
    seats: list[str | None] = [None] * height
    named: set[str] = set()
    for x, step in enumerate(steps):
        present = {row.request_id: row for row in step}
        seats = [name if name in present else None for name in seats]
        for newcomer in [name for name in present if name not in seats]:
            seats[seats.index(None)] = newcomer
        for y, name in enumerate(seats):
            if name is not None:
                axes.bar(x, 0.86, 0.94, bottom=y + 0.07, color=color[name])
                label = f"{present[name].num_scheduled}" if name in named else f"{name}: {present[name].num_scheduled}"
                named.add(name)
                axes.text(x, y + 0.5, label, ha="center", va="center", fontsize=9, color=ink_on(color[name]))
    style(axes, "Rows of the batch: which request, and how many of its tokens are computed in this step", "", "row")
    axes.set_yticks([y + 0.5 for y in range(height)], [str(y) for y in range(height)])
    axes.invert_yaxis()


def _draw_blocks(axes: Any, steps: Seq[Seq[Row]], num_blocks: int, color: dict[str, str]) -> None:
    named: set[str] = set()
    for x, step in enumerate(steps):
        for row in step:
            if row.request_id not in named:
                named.add(row.request_id)
                block = row.block_table[0]
                axes.text(x, block, row.request_id, ha="center", va="center", color=ink_on(color[row.request_id]))
            for block in row.block_table:
                axes.bar(x, 0.86, 0.94, bottom=block - 0.43, color=color[row.request_id])
    style(axes, "Blocks of the KV pool: colour is the owner", "", "block id")
    axes.set_ylim(num_blocks - 0.4, -0.6)
    axes.set_yticks(range(0, num_blocks, 2))
    axes.axhspan(-0.43, 0.43, color=GRID)
    axes.text(0, 0, " block 0, the null block, is never given out", va="center", fontsize=8, color=INK)


def _draw_counters(axes: Any, steps: Seq[Seq[Row]], follow: str, shade: str) -> None:
    points = [(x, row) for x, step in enumerate(steps) for row in step if row.request_id == follow]
    xs = [x for x, _ in points]
    has = [row.num_tokens for _, row in points]
    axes.step(xs, has, where="mid", color=INK, linewidth=1.6)
    axes.bar(xs, [row.num_computed_tokens for _, row in points], 0.94, color=shade)
    axes.annotate("tokens it has", (xs[0], has[0]), (0, 7), textcoords="offset points", fontsize=9, color=INK)
    axes.text(xs[0] - 0.4, 1, " computed after this step", fontsize=9, color=ink_on(shade))
    style(axes, f"The two counters of request {follow}", "step", "tokens")
    axes.set_ylim(0, max(has) * 1.15)
