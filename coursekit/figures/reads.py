"""What a decode round reads, and for whom: chapter 02, book 8.2.1.

Functions from plain numbers (GiB, rows) to figures; where the numbers come from is the notebook's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS, KV, TOTAL = PALETTE[0], PALETTE[1], INK
_CONTEXTS = (PALETTE[2], PALETTE[5], PALETTE[3], PALETTE[4])


def round_reads(batches: Sequence[int], weights: float, kv: float) -> Figure:
    """One bar a round, to scale: the weights once, then a cell for each request's context. GiB."""
    figure = new_figure(9, 0.62 * len(batches) + 1.1)
    axes = figure.subplots()
    for y, batch in enumerate(batches):
        axes.barh(y, weights, 0.66, color=WEIGHTS)
        edge = PAPER if batch < 100 else KV  # cells too thin for a border are one area
        axes.barh([y] * batch, [kv] * batch, 0.66, [weights + i * kv for i in range(batch)], color=KV, edgecolor=edge)
        total = weights + batch * kv
        note = f" {total:.1f} GiB for {batch} token{'s' if batch > 1 else ''}: {total / batch:.2f} each"
        axes.text(total, y, note, va="center", fontsize=9, color=INK)
    axes.text(weights / 2, 0, f"weights {weights:.1f}", ha="center", va="center", fontsize=9, color=ink_on(WEIGHTS))
    last = len(batches) - 1
    axes.text(weights / 2, last, "read once for all", ha="center", va="center", fontsize=9, color=ink_on(WEIGHTS))
    middle = weights + batches[-1] * kv / 2
    box = {"facecolor": KV, "edgecolor": "none", "pad": 1.5}
    axes.text(middle, last, f"{batches[-1]} contexts", ha="center", va="center", fontsize=9, color=ink_on(KV), bbox=box)
    axes.set_yticks(range(len(batches)), [f"{batch}" for batch in batches])
    axes.invert_yaxis()
    axes.set_xlim(0, (weights + batches[-1] * kv) * 1.36)
    style(axes, "What one decode round reads, to scale", "read in one round (GiB)", "requests in the batch")
    return figure


def reads_per_token(
    batches: Sequence[int],
    weights: float,
    contexts: Mapping[str, float],
    crossings: Mapping[str, int] | None = None,
    batch: int | None = None,
) -> Figure:
    """Bytes read for each output token against the batch, both axes logarithmic (book figure 8-3). GiB.

    contexts: label → KV of one context. crossings: label → batch from which on KV outweighs the weights.
    batch: mark this one, with its value on every curve.
    """
    figure = new_figure(8.6, 4.6)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    share = [weights / b for b in batches]
    axes.plot(batches, share, "--", color=WEIGHTS, linewidth=1.5)
    for color, (label, kv) in zip(_CONTEXTS, contexts.items(), strict=False):
        axes.plot(batches, [weights / b + kv for b in batches], color=color, linewidth=2.2)
        axes.plot(batches, [kv] * len(batches), ":", color=color, linewidth=1)
        name = f"{label}, floor {round(kv, 3)} GiB"
        axes.annotate(name, (batches[-1], kv), (6, 0), textcoords="offset points", va="center", color=color, fontsize=9)
        if crossings and batches[0] <= crossings[label] <= batches[-1]:
            at = crossings[label]
            axes.plot(at, weights / at + kv, "o", color=color, markersize=8)
            text = f"{at}: KV ≥ weights"
            axes.annotate(text, (at, weights / at + kv), (8, 9), textcoords="offset points", color=color, fontsize=9)
        if batch is not None:
            value = weights / batch + kv
            axes.plot(batch, value, "s", color=color, markersize=8)
            note = f"{value:.2f} GiB"  # above the label of a crossing at the same place
            axes.annotate(note, (batch, value), (8, 22), textcoords="offset points", color=INK, fontsize=11)
    axes.annotate(
        "weights alone: halved by\neach doubling",
        (batches[-1], share[-1]),
        (6, 0),
        textcoords="offset points",
        va="center",
        color=WEIGHTS,
        fontsize=9,
    )
    _powers(axes, batches)
    axes.set_ylim(
        min(share[-1], *contexts.values()) / 1.6, (weights + max(contexts.values())) * (1.5 if batch is None else 4)
    )
    style(axes, "Reads per output token", "requests in the batch", "read for each output token (GiB)")
    return figure


def two_supplies(batches: Sequence[int], shared: Sequence[float], kv: float, label: str) -> Figure:
    """Reads per token with weights from the card's memory, and from a store of their own (book figure 8-4). GiB."""
    figure = new_figure(8, 3.8)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.fill_between(batches, shared, [kv] * len(batches), color=GRID)
    axes.plot(batches, shared, color=WEIGHTS, linewidth=2.2)
    axes.plot(batches, [kv] * len(batches), color=KV, linewidth=2.2)
    axes.annotate(
        "weights and KV: W/B + K", (batches[1], shared[1]), (10, 4), textcoords="offset points", color=WEIGHTS
    )
    axes.text(batches[0], kv, f"weights from elsewhere: K = {round(kv, 3)} GiB", va="bottom", color=INK, fontsize=9)
    axes.text(batches[0] * 1.12, shared[0] * 0.4, "what the\nstore saves", color=INK, fontsize=9)
    _powers(axes, batches)
    axes.set_ylim(0, shared[0] * 1.08)
    style(axes, f"Read from the card's memory, {label}", "requests in the batch", "read for each output token (GiB)")
    return figure


def adapter_rows(cases: Mapping[str, Sequence[int]]) -> Figure:
    """The rows of a batch, grouped by adapter: label → rows of each group, largest first."""
    height = max(sum(rows) for rows in cases.values())
    figure = new_figure(8.6, 3.9)
    axes = figure.subplots()
    for x, rows in enumerate(cases.values()):
        top = 0
        for group, count in enumerate(rows):
            color = PALETTE[group % len(PALETTE)]
            axes.bar([x] * count, [0.86] * count, 0.5, [top + i + 0.07 for i in range(count)], color=color)
            axes.plot([x + 0.29, x + 0.29], [top + 0.1, top + count - 0.1], color=INK, linewidth=1.2)
            if count > 1 or group == 0:
                text = f"{count} row{'s' if count > 1 else ''}\nread A·B once" if count > 1 else "1 row"
                axes.text(x + 0.33, top + count / 2, text, va="center", fontsize=8.5, color=INK)
            top += count
    axes.set_xticks(range(len(cases)), list(cases))
    axes.set_xlim(-0.5, len(cases) - 0.2)
    axes.set_ylim(height, 0)
    style(axes, "The same batch, low-rank part only: rows that share an adapter", "", "row of the batch")
    return figure


def _powers(axes: Any, batches: Sequence[int]) -> None:
    """Ticks at powers of two that read as numbers, and room on the right for labels."""
    ticks = [2**i for i in range(batches[-1].bit_length()) if batches[0] <= 2**i <= batches[-1]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
