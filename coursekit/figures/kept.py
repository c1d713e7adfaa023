"""What a kept prefix is worth, which ones share a space, and what policies find on a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mini_engine.analysis import KeptPrefix, KeptSet

_LINES = (PALETTE[0], PALETTE[5], PALETTE[2], PALETTE[3])


def value_lines(prefixes: Mapping[str, KeptPrefix], probability: float | None = None) -> Figure:
    """Expected saving in ms against the chance of reuse, a line for each; where it crosses zero is its threshold.

    probability: a chance that is marked, with the values there.
    """
    figure = new_figure(9.2, 3.8)
    axes = figure.subplots()
    tops: list[float] = []
    ends: dict[str, tuple[float, str]] = {}
    marked: list[float] = []
    for (name, prefix), shade in zip(prefixes.items(), _LINES, strict=False):
        values = [replace(prefix, reuse_probability=p).value_s * 1e3 for p in (0.0, 1.0)]
        tops += values
        axes.plot([0, 1], values, color=shade, linewidth=2)
        ends[f"{name}: never" if prefix.threshold is None else f"{name}: from {prefix.threshold:.1%} on"] = (
            values[1],
            shade,
        )
        if prefix.threshold is not None:
            axes.plot(prefix.threshold, 0, "o", color=shade, markersize=8, zorder=4)
        if probability is not None:
            value = replace(prefix, reuse_probability=probability).value_s * 1e3
            axes.plot(probability, value, "s", color=shade)
            side = (-6, 4, "right") if value >= max(marked, default=value) else (6, -12, "left")
            if probability < 0.1:  # no room on the left
                side = (8, 4, "left")
            marked.append(value)
            axes.annotate(f"{value:,.1f}", (probability, value), side[:2], textcoords="offset points", color=INK,
                          ha=side[2], fontsize=9)  # fmt: skip
    axes.axhline(0, color=INK, linewidth=1.2)
    title = "Expected saving of a kept prefix" + (f", p = {probability:g} marked" if probability is not None else "")
    style(axes, title, "chance that it is used again, $p_h$", "ms saved, $V_h$")
    low, high = min(0.0, *tops), max(0.0, *tops)
    margin, place = 0.1 * (high - low), float("inf")
    for word, (end, shade) in sorted(ends.items(), key=lambda item: -item[1][0]):  # from the top down, none on another
        place = min(end, place - 0.07 * (high - low))
        axes.text(1.02, place, word, va="center", color=shade, fontsize=9.5)
    axes.set_xlim(0, 1.42)
    axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_ylim(low - margin, high + margin)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def same_space(sets: Mapping[str, KeptSet], budget_mib: int) -> Figure:
    """Sets of prefixes in one space: width is MiB, written in each what it saves; the total on the right."""
    figure = new_figure(9.2, 0.85 * len(sets) + 1.1)
    axes = figure.subplots()
    for y, (_, chosen) in enumerate(sets.items()):
        left = 0.0
        for i, prefix in enumerate(chosen.prefixes):
            shade = (PALETTE[0], PALETTE[4])[i % 2] if len(chosen.prefixes) > 1 else PALETTE[2]
            size = prefix.num_bytes / 2**20
            axes.barh(y, size, 0.62, left=left, color=shade)
            axes.text(left + size / 2, y, f"{prefix.name}\n{prefix.value_s * 1e3:.1f} ms", ha="center", va="center",
                      fontsize=9, color=ink_on(shade))  # fmt: skip
            left += size
        axes.text(budget_mib * 1.02, y, f"saves {chosen.value_s * 1e3:.1f} ms", va="center", color=INK,
                  fontweight="bold")  # fmt: skip
    axes.axvline(budget_mib, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
    style(axes, f"One space of {budget_mib:,} MiB", "MiB", "")
    axes.set_yticks(range(len(sets)), list(sets))
    axes.set_ylim(len(sets) - 0.5, -0.5)
    axes.set_xlim(0, budget_mib * 1.27)
    return figure


def policy_hits(pools_gib: Sequence[float], hits: Mapping[str, Sequence[float]], bound: Sequence[float]) -> Figure:
    """Share of prompt tokens found by each policy against the pool, and the bound that none can pass."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    places = range(len(pools_gib))
    width = 0.8 / len(hits)
    for i, ((name, shares), shade) in enumerate(zip(hits.items(), _LINES, strict=False)):
        at = [place - 0.4 + (i + 0.5) * width for place in places]
        axes.bar(at, [100 * share for share in shares], width * 0.92, color=shade)
        for x, share in zip(at, shares, strict=True):
            axes.text(x, 2, name, rotation=90, ha="center", va="bottom", fontsize=9, color=ink_on(shade))
            axes.text(
                x, 100 * share - 1, f"{100 * share:.1f}", ha="center", va="top", fontsize=8.5, color=ink_on(shade)
            )
    for place, share in zip(places, bound, strict=True):
        axes.plot([place - 0.42, place + 0.42], [100 * share] * 2, color=INK, linewidth=2)
        axes.text(place + 0.43, 100 * share, f"bound\n{100 * share:.1f}", va="center", fontsize=8.5, color=INK)
    style(axes, "What each policy finds, and Belady's bound", "pool", "% of prompt tokens found")
    axes.set_xticks(places, [f"{size:g} GiB" for size in pools_gib])
    axes.set_xlim(-0.55, len(pools_gib) - 0.35)
    axes.set_ylim(0, 105)
    return figure
