"""What an exchange between ranks moves, and when it pays (chapter 10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def exchange_parts(ways: Mapping[str, Mapping[str, float]], unit: str = "KiB") -> Figure:
    """What each way moves in a layer, by what it is. ways: title → {part: amount}; same parts in the same order."""
    figure = new_figure(8.8, 0.58 * len(ways) + 1.0)
    axes = figure.subplots()
    widest = max(sum(parts.values()) for parts in ways.values())
    for y, parts in enumerate(ways.values()):
        left = 0.0
        for shade, (name, amount) in zip(PALETTE, parts.items(), strict=False):
            axes.barh(y, amount, 0.72, left=left, color=shade, edgecolor=PAPER)
            if amount > 0.14 * widest:
                axes.text(left + amount / 2, y, f"{name} {amount:.4g}", ha="center", va="center", fontsize=9,
                          color=ink_on(shade))  # fmt: skip
            left += amount
        thin = ", ".join(f"{name} {amount:.4g}" for name, amount in parts.items() if 0 < amount <= 0.14 * widest)
        total = f"{left:.4g}" + (f", of it {thin}" if thin else "")
        axes.text(left + 0.01 * widest, y, total, va="center", fontsize=9, color=INK)
    style(axes, "What a rank receives in one layer", f"{unit} for each request", "")
    axes.set_yticks(range(len(ways)), list(ways))
    axes.set_ylim(len(ways) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.24)
    return figure


def against_context(contexts: Sequence[int], curves: Mapping[str, Sequence[float]], y: str, title: str) -> Figure:
    """Curves over the length of the context, both axes logarithmic, named at their ends."""
    return _curves(contexts, curves, "tokens of context", y, title, [f"{c // 1024}K" for c in contexts])


def break_even(batches: Sequence[int], curves: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Context from which cutting it makes a step shorter, over the batch, a curve a link."""
    return _curves(batches, curves, "requests in the batch", "break-even context (tokens)", title,
                   [str(b) for b in batches])  # fmt: skip


def _curves(
    xs: Sequence[int], curves: Mapping[str, Sequence[float]], x: str, y: str, title: str, ticks: Sequence[str]
) -> Figure:
    figure = new_figure(8.4, 3.9)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    for shade, (name, values) in zip((PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[3]), curves.items(), strict=False):
        axes.plot(xs, values, "o-", color=shade, linewidth=2, markersize=4)
        axes.annotate(name, (xs[-1], values[-1]), (8, 0), textcoords="offset points", va="center", color=shade,
                      fontsize=9)  # fmt: skip
    axes.set_xticks(xs, ticks)
    axes.minorticks_off()
    axes.set_xlim(xs[0] / 1.15, xs[-1] * (xs[-1] / xs[0]) ** 0.42)
    style(axes, title, x, y)
    return figure


def plateau(
    concurrency: Sequence[int],
    growth: Mapping[str, Sequence[float | None]],
    kv: Mapping[str, Sequence[float | None]],
) -> Figure:
    """Throughput as multiples and KV in use, over requests in flight. None: no figure was printed there.

    Names that end in "post" are drawn dashed, and TP and DCP keep their colours.
    """
    figure = new_figure(10.4, 4.2)
    panels = figure.subplots(1, 2)
    for axes, curves in zip(panels, (growth, kv), strict=True):
        axes.set_xscale("log", base=2)
        for name, values in curves.items():
            known = [(c, v) for c, v in zip(concurrency, values, strict=True) if v is not None]
            shade, printed = PALETTE[5 if name.startswith("TP") else 0], name.endswith("post")
            axes.plot(*zip(*known, strict=True), "s--" if printed else "o-", color=shade, linewidth=1.8, markersize=5,
                      markerfacecolor=PAPER if printed else shade)  # fmt: skip
            above = printed and (name.startswith("DCP") or axes is panels[1])  # clear of the line it lies beside
            side = (7, 7 if above else -11 if printed else -5 if name.startswith("DCP") else 2)
            axes.annotate(name, known[-1], side, textcoords="offset points", va="center", color=shade, fontsize=9)
        axes.set_xticks(concurrency, [str(c) for c in concurrency])
        axes.minorticks_off()
        axes.set_xlim(concurrency[0] / 1.2, concurrency[-1] * 3.4)
    style(panels[0], "Throughput, over that of TP at the first point", "requests in flight", "multiple")
    style(panels[1], "KV in use", "requests in flight", "share of the pool (%)")
    panels[0].set_ylim(0, panels[0].get_ylim()[1] * 1.04)
    panels[1].set_ylim(0, 108)
    return figure
