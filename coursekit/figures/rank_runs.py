"""What lab 10-1 measured on its ranks: a step beside the floor under it, and the room that a cut makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import INK, PALETTE, PAPER, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def steps_and_floors(steps_ms: Mapping[str, float], floors_ms: Mapping[str, float], title: str) -> Figure:
    """A bar a way: its measured step. A black line in it: what its collectives alone take at least."""
    figure = new_figure(8.8, 0.42 * len(steps_ms) + 1.1)
    axes = figure.subplots()
    widest = max(*steps_ms.values(), *floors_ms.values())
    for y, (name, step) in enumerate(steps_ms.items()):
        cut = name.startswith("dcp")
        axes.barh(y, step, 0.7, color=PALETTE[4 if cut else 1], edgecolor=PAPER)
        axes.plot([floors_ms[name]] * 2, [y - 0.35, y + 0.35], color=INK, linewidth=2.5)
        said = f"{step:.1f} ms, its collectives {floors_ms[name]:.1f}"
        axes.text(max(step, floors_ms[name]) + 0.01 * widest, y, said, va="center", fontsize=9, color=INK)
    style(axes, title, "ms a step (bar); black line: its collectives, if each carried nothing", "")
    axes.set_yticks(range(len(steps_ms)), list(steps_ms))
    axes.set_ylim(len(steps_ms) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.42)
    return figure


def room(
    panels: Mapping[str, Mapping[str, tuple[float, int]]], units: Sequence[str] = ("KiB a token and rank", "requests")
) -> Figure:
    """For each pool two groups of bars: KV bytes of a token of context on a rank, and requests that run at once.

    panels: title → {cut: (KiB a token and rank, requests at once)}.
    """
    figure = new_figure(10.2, 0.34 * max(map(len, panels.values())) * len(panels) + 1.4 * len(panels))
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for row, (title, bars) in zip(grid, panels.items(), strict=True):
        for side, (axes, unit) in enumerate(zip(row, units, strict=True)):
            values = [pair[side] for pair in bars.values()]
            for y, (name, value) in enumerate(zip(bars, values, strict=True)):
                axes.barh(y, value, 0.7, color=PALETTE[4 if "DCP" in name else 1], edgecolor=PAPER)
                axes.text(value + 0.015 * max(values), y, f"{value:,.4g}", va="center", fontsize=9, color=INK)
            style(axes, title if side == 0 else "", unit, "")
            axes.set_yticks(range(len(bars)), list(bars) if side == 0 else [""] * len(bars))
            axes.set_ylim(len(bars) - 0.5, -0.5)
            axes.set_xlim(0, max(values) * 1.18)
    return figure
