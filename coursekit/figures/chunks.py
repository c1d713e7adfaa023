"""Prefill in chunks: the area of causal pairs, what each chunk of a long prompt costs, and what cutting buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, *_ = PALETTE
VERMILION = PALETTE[5]


def pair_areas(chunk: int, history: int) -> Figure:
    """Every causal pair as a square: a row for each new token, a column for each token it attends to."""
    from matplotlib.ticker import MaxNLocator

    wide = min(7.4, 0.75 * (history + chunk))
    figure = new_figure(max(wide, 3.4) + 0.6, wide * chunk / (history + chunk) + 1)
    axes = figure.subplots()
    axes.set_aspect("equal")
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6 if history + chunk <= 40 else 0.2}
    for row in range(chunk):
        axes.bar(range(history), 1, 1, bottom=row, align="edge", color=BLUE, **edge)
        axes.bar(range(history, history + row + 1), 1, 1, bottom=row, align="edge", color=ORANGE, **edge)
    triangle = chunk * (chunk + 1) // 2
    total = f"{chunk} × {history} + {chunk} × {chunk + 1} / 2 = {chunk * history + triangle:,} causal pairs"
    style(axes, total, "attended token (position)", "new token")
    if history:
        _label(axes, history / 2, chunk / 2, f"old context: {chunk * history:,}", BLUE)
    _label(axes, history + 0.72 * chunk, 0.22 * chunk, f"triangle: {triangle:,}", None)
    axes.set_xlim(0, history + chunk)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(chunk, 0)
    axes.set_yticks([row + 0.5 for row in range(chunk)], [str(row + 1) for row in range(chunk)])
    return figure


def chunk_work(histories: Sequence[int], per_token: Sequence[float], per_pair: Sequence[float]) -> Figure:
    """Matrix work of each chunk in TFLOP, the part that goes with tokens below, the part that goes with pairs above."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    places = range(len(histories))
    axes.bar(places, per_token, 0.8, color=BLUE)
    axes.bar(places, per_pair, 0.8, bottom=per_token, color=ORANGE)
    label = {"facecolor": BLUE, "edgecolor": "none"}
    middle = len(histories) / 2 - 0.5
    axes.text(
        middle, per_token[0] / 2, "projections and FFN: the same in every chunk", color=ink_on(BLUE), ha="center",
        bbox=label,
    )  # fmt: skip
    ends = [per_token[i] + per_pair[i] for i in (0, -1)]
    axes.text(0, ends[0] * 1.03, f"{ends[0]:.2f}", ha="center", color=INK)
    axes.text(places[-1], ends[1] * 1.02, f"{ends[1]:.2f}", ha="center", color=INK)
    axes.annotate(
        "attention: grows with the context",
        (places[-4], per_token[-4] + per_pair[-4] / 2),
        (places[-12], ends[1] * 0.98),
        arrowprops={"arrowstyle": "-", "color": INK},
        color=INK,
        fontsize=9,
    )
    style(axes, f"{len(histories)} chunks of one prompt: matrix work", "context before the chunk (tokens)", "TFLOP")
    axes.set_xticks(places, [f"{history:,}" for history in histories], rotation=45, fontsize=8)
    axes.set_ylim(0, ends[1] * 1.15)
    return figure


def tradeoff(chunks: Sequence[int], totals_ms: Sequence[float], gaps_ms: Sequence[float]) -> Figure:
    """Chunk size against total time and longest gap."""
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    for values, color, name in ((totals_ms, BLUE, "all requests done"), (gaps_ms, VERMILION, "longest gap")):
        axes.plot(chunks, values, "o-", color=color)
        text = f"{name}: {values[0]:,.0f} ms"
        axes.annotate(text, (chunks[0], values[0]), (8, 6), textcoords="offset points", color=color)
        end = f"{values[-1]:,.0f}"
        axes.annotate(end, (chunks[-1], values[-1]), (0, 7), textcoords="offset points", color=INK, ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(chunks, [f"{chunk:,}" for chunk in chunks])
    axes.minorticks_off()
    axes.set_ylim(0, max(totals_ms) * 1.12)
    style(axes, "What cutting a prompt costs, and what it buys", "largest chunk of a prompt in a round (tokens)", "ms")
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def largest_chunks(histories: Sequence[int], chunks: Mapping[float, Sequence[int]], mark: str = "") -> Figure:
    """For each promised gap in ms, the most prefill tokens a round may take, against the context already cached."""
    figure = new_figure(8, 3.6)
    axes = figure.subplots()
    for (gap_ms, values), color in zip(chunks.items(), (BLUE, GREEN, VERMILION, ORANGE), strict=False):
        axes.plot(histories, values, "-", color=color, linewidth=2)
        axes.annotate(
            f"{gap_ms:g} ms: {values[0]:,} → {values[-1]:,}", (histories[0], values[0]), (6, 6),
            textcoords="offset points", color=color,
        )  # fmt: skip
    style(axes, f"The largest chunk that keeps the gap{mark}", "prompt tokens already cached", "tokens of prefill")
    axes.set_ylim(0, max(max(values) for values in chunks.values()) * 1.15)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def _label(axes, x: float, y: float, text: str, shade: str | None) -> None:
    ink = ink_on(shade) if shade else INK
    box = {"facecolor": shade, "edgecolor": "none", "pad": 2} if shade else None
    axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=10, bbox=box)
