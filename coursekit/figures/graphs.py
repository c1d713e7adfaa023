"""Rows that are computed against rows that are wanted: the staircase of captured CUDA graph shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def padding_staircase(steps: Sequence[tuple[int, int]], shapes: Sequence[int], marks: Mapping[int, str]) -> Figure:
    """steps: (rows wanted, rows computed). marks: what to write beside some of the wanted rows."""
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    rows, computed = [wanted for wanted, _ in steps], [done for _, done in steps]
    axes.bar(rows, rows, 1, color=PALETTE[0], edgecolor="white", linewidth=0.3)
    padded = [done - wanted for wanted, done in steps]
    axes.bar(rows, padded, 1, bottom=rows, color=PALETTE[1], edgecolor="white", linewidth=0.3)
    height = dict(steps)
    for i, (wanted, text) in enumerate(sorted(marks.items())):
        # The first to the left of its arrow, the others to the right, so that neighbours do not meet.
        axes.annotate(
            f"{text} " if i == 0 else f" {text}", (wanted, height[wanted]), (wanted, max(computed) * 1.12),
            ha="left" if i else "right", color=INK, arrowprops={"arrowstyle": "->", "color": INK},
        )  # fmt: skip
    axes.text(rows[-1], rows[-1] * 0.45, "wanted ", ha="right", color="white", fontweight="bold")
    axes.text(rows[0], max(shapes[0] * 0.8, 1), " padding", color="black", va="center", fontweight="bold")
    names = " and ".join(str(shape) for shape in shapes)
    style(axes, f"Graphs captured for {names} rows", "rows wanted in the round", "rows computed")
    axes.set_ylim(0, max(computed) * 1.25)
    axes.set_xlim(rows[0] - 0.7, rows[-1] + 0.7)
    axes.set_yticks(sorted({0, *shapes}))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure
