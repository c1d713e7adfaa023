"""What a card can do with what it reads: rooflines and least times of a round (chapter 02, book 8.2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE, MEMORY, MEASURED = PALETTE[5], PALETTE[0], PALETTE[2]


def roofline(
    bandwidth: float,
    peak: float,
    points: Mapping[str, float],
    measured: Mapping[str, tuple[float, float]] | None = None,
    title: str = "Roofline",
) -> Figure:
    """Attainable operations a second against operations per byte read, both axes logarithmic.

    bandwidth: bytes a second. peak: operations a second. points: label → intensity, drawn on the roof.
    measured: label → (intensity, operations a second), drawn where they are. Source: Williams et al. 2009.
    """
    figure = new_figure(8.6, 4.6)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    ridge = peak / bandwidth
    unit, prefix = (1e12, "T") if peak >= 1e12 else (1e9, "G")
    left, right = min(0.5, *points.values()), max(2000.0, *points.values())
    axes.plot([left, ridge], [left * bandwidth / unit, peak / unit], color=MEMORY, linewidth=2.2)
    axes.plot([ridge, right], [peak / unit, peak / unit], color=COMPUTE, linewidth=2.2)
    axes.axvline(ridge, color=GRID, linewidth=1, zorder=0)
    slope = (left * 6, left * 6 * bandwidth / unit)
    axes.annotate(
        f"limited by reading\n{bandwidth / unit:.3g} {prefix}B/s",
        slope, (-10, 12), textcoords="offset points", ha="right", color=MEMORY, fontsize=9,
    )  # fmt: skip
    axes.annotate(
        f"limited by computing: {peak / unit:,.0f} {prefix}FLOP/s",
        (ridge, peak / unit), (-6, 7), textcoords="offset points", ha="right", color=COMPUTE, fontsize=9,
    )  # fmt: skip
    axes.text(ridge * 1.06, left * bandwidth / unit, f"ridge: {ridge:.3g} FLOP/B", color=INK, fontsize=9)
    for label, intensity in points.items():
        value = min(peak, intensity * bandwidth) / unit
        axes.plot(intensity, value, "o", color=INK, markersize=7)
        axes.annotate(label, (intensity, value), (9, -11), textcoords="offset points", color=INK, fontsize=9)
    for label, (intensity, rate) in (measured or {}).items():
        axes.plot(intensity, rate / unit, "D", color=MEASURED, markersize=6)
        at_the_roof = rate > 0.75 * min(peak, intensity * bandwidth)  # then below the label of the point there
        offset = (9, -26 if at_the_roof else -9)
        axes.annotate(label, (intensity, rate / unit), offset, textcoords="offset points", color=MEASURED, fontsize=9)
    axes.set_ylim(top=peak / unit * 2)
    style(axes, title, "operations for each byte read (FLOP/B)", f"attainable ({prefix}FLOP/s)")
    return figure


def step_terms(
    batches: Sequence[int],
    terms: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    meets: Mapping[str, int | None],
) -> Figure:
    """Time of computing and of reading against the batch, a panel for each label → (compute ms, read ms).

    meets: label → batch from which on computing takes longer, None where there is none.
    """
    figure = new_figure(9, 3.9)
    panels = figure.subplots(1, len(terms), sharey=True, squeeze=False)[0]
    for axes, (label, (compute, read)) in zip(panels, terms.items(), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.plot(batches, compute, color=COMPUTE, linewidth=2.2)
        axes.plot(batches, read, color=MEMORY, linewidth=2.2)
        axes.text(batches[2], compute[1], "computing", color=COMPUTE, fontsize=9)
        axes.text(batches[1], read[1] * 1.2, "reading", color=MEMORY, fontsize=9)
        at = meets[label]
        if at is None:
            axes.text(batches[-1], compute[0], "they never meet", ha="right", color=INK, fontsize=9)
        else:
            point = (at, at * compute[0] / batches[0])
            axes.plot(*point, "o", color=INK, markersize=8)
            text = f"batch {at:,}"
            axes.annotate(text, point, (-8, 10), textcoords="offset points", ha="right", color=INK, fontsize=9)
        axes.set_xticks(batches[::2], [f"{batch:,}" for batch in batches[::2]])
        axes.minorticks_off()
        style(axes, label, "requests in the batch", "")
    panels[0].set_ylabel("least time of a round (ms)", color=INK)
    return figure


def against_bound(batches: Sequence[int], bound_ms: Sequence[float], measured_ms: Sequence[float]) -> Figure:
    """Measured rounds over the time their bytes need at the nominal bandwidth, and what lies between. Milliseconds."""
    figure = new_figure(8.2, 3.8)
    axes = figure.subplots()
    xs = range(len(batches))
    axes.bar(xs, bound_ms, 0.55, color=MEMORY)
    gaps = [took - least for took, least in zip(measured_ms, bound_ms, strict=True)]
    axes.bar(xs, gaps, 0.55, bottom=bound_ms, color=GRID)
    for x, least, took, gap in zip(xs, bound_ms, measured_ms, gaps, strict=True):
        axes.text(x, least / 2, f"{least:.2f}", ha="center", va="center", color="white", fontsize=9)
        axes.text(x, least + gap / 2, f"{gap:.1f}", ha="center", va="center", color=INK, fontsize=9)
        axes.text(x, took, f"{took:.2f} ms: {least / took:.0%}", ha="center", va="bottom", color=INK, fontsize=9)
    axes.text(0.33, bound_ms[0] / 2, "reading at\nfull speed", va="center", color=MEMORY, fontsize=9)
    axes.text(0.33, bound_ms[0] + gaps[0] / 2, "the rest", va="center", color=INK, fontsize=9)
    axes.set_xticks(xs, [str(batch) for batch in batches])
    axes.set_ylim(0, max(measured_ms) * 1.15)
    style(axes, "A measured decode round, and its MBU", "requests in the batch", "time (ms)")
    return figure
