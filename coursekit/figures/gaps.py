"""All gaps between output tokens of a run, sorted: where the median, the 95th percentile and the longest one lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from coursekit.figures.show import GRID, INK, PALETTE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gap_percentiles(gaps: Mapping[str, Sequence[float]], unit: str = "ms", first: float = 80) -> Figure:
    """A curve for each run: the share of its gaps, from `first` % on, that are no longer than so much."""
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    for i, (name, values) in enumerate(gaps.items()):
        ordered = np.sort(np.asarray(values, dtype=float))
        shares = 100 * np.arange(1, len(ordered) + 1) / len(ordered)
        color = (PALETTE[0], PALETTE[5], PALETTE[2])[i % 3]
        axes.step(shares, ordered, where="pre", color=color, linewidth=2)
        axes.plot(100, ordered[-1], "o", color=color)
        text = f"{name}: the longest is {ordered[-1]:.3g} {unit}"
        axes.text(0.02, 0.92 - 0.09 * i, text, transform=axes.transAxes, color=color)
    axes.axvline(95, color=INK, linewidth=1, linestyle="--")
    low = min(float(np.percentile(np.asarray(values, dtype=float), first)) for values in gaps.values())
    high = max(max(values) for values in gaps.values())
    axes.text(95.1, low * 0.72, "p95", color=INK)
    title = f"Gaps between output tokens, sorted; the shortest {first:g} % are left out"
    style(axes, title, "share of all gaps (%)", f"gap ({unit}, log scale)")
    axes.set_yscale("log")
    ticks = [tick for power in range(-3, 7) for tick in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    shown = [tick for tick in ticks if low * 0.65 <= tick <= high * 1.6]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_xlim(first, 100.4)
    axes.set_ylim(low * 0.65, high * 1.6)
    return figure
