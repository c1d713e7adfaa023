"""What a batch sweep shows: what the machine gains and what a user pays (chapter 02, lab 8-1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def gain_and_price(
    batches: Sequence[int], tokens_per_s: Sequence[float], ttft_ms: Sequence[float], itl_ms: Sequence[float]
) -> Figure:
    """Throughput against each of the two latencies; a point is a batch size."""
    figure = new_figure(9, 3.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, times, color, name in zip(
        panels, (ttft_ms, itl_ms), PALETTE, ("time to first token (ms)", "mean time between tokens (ms)"), strict=False
    ):
        axes.plot(times, tokens_per_s, "o-", color=color, linewidth=1.8)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1  # its label goes to the left, clear of the edge
            offset, side = ((-9, 2), "right") if last else ((7, -13), "left")
            at = (times[i], tokens_per_s[i])
            axes.annotate(f"batch {batch}", at, offset, textcoords="offset points", ha=side, color=INK, fontsize=9)
        style(axes, "", name, "")
        axes.margins(0.12)
    panels[0].set_xscale("log")
    panels[0].set_ylabel("output tokens a second", color=INK)
    figure.suptitle("What the machine gains, and what a user pays", x=0.01, ha="left", fontsize=11, color=INK)
    return figure


def relative_rounds(series: Mapping[str, tuple[Sequence[int], Sequence[float]]], crossing: int | None = None) -> Figure:
    """A round's time, or its bytes, as a multiple of that of batch 1: label → (batches, multiples)."""
    figure = new_figure(8.4, 4.2)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    largest = max(batches[-1] for batches, _ in series.values())
    axes.plot([1, largest], [1, largest], ":", color=INK, linewidth=1)
    axes.annotate("no gain from batching", (largest / 2, largest / 2), (-6, 4), textcoords="offset points", ha="right",
                  color=INK, fontsize=9)  # fmt: skip
    for color, (label, (batches, multiples)) in zip(PALETTE, series.items(), strict=False):
        axes.plot(batches, multiples, "o-", color=color, linewidth=2)
        axes.annotate(label, (batches[-1], multiples[-1]), (8, 0), textcoords="offset points", va="center", color=color,
                      fontsize=9)  # fmt: skip
    if crossing is not None:
        axes.axvline(crossing, color=GRID, zorder=0)
        axes.text(crossing, axes.get_ylim()[0], f" {crossing}: KV ≥ weights", color=INK, fontsize=9, va="bottom")
    ticks = [2**i for i in range(largest.bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [f"{tick}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.9, largest * 2.6)
    style(axes, "A round against that of one request", "requests in the batch", "multiple of the round at batch 1")
    return figure


def measured_and_fitted(measured_ms: Mapping[str, float], fitted_ms: Mapping[str, float]) -> Figure:
    """Each kind of round: what it took, and what the fitted step says. Milliseconds, both axes logarithmic."""
    figure = new_figure(6.4, 5.0)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    values = [*measured_ms.values(), *fitted_ms.values()]
    low, high = min(values) / 1.5, max(values) * 1.5
    axes.plot([low, high], [low, high], color=GRID, zorder=0)
    for i, (label, took) in enumerate(measured_ms.items()):
        at = (took, fitted_ms[label])
        offset, side = ((8, -11), "left") if i % 2 else ((-8, 5), "right")  # neighbours on different sides
        axes.plot(*at, "o", color=PALETTE[0], markersize=7)
        axes.annotate(label, at, offset, textcoords="offset points", ha=side, color=INK, fontsize=8.5)
    axes.set_xlim(low / 2, high * 2)
    axes.set_ylim(low, high)
    style(axes, "On the line, the step model is right", "measured (ms)", "fitted (ms)")
    return figure
