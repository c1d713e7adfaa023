"""Shared KV as pictures: counts of references, a copied tail, branches of one prompt, and a release that waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COUNTS = (PAPER, PALETTE[4], PALETTE[0])  # nobody, one table, several


def reference_counts(history: Mapping[str, Mapping[int, int]]) -> Figure:
    """A line for each event, a column for each block: how many tables map it; a frame where it came free just then.

    history: event → {block: references}.
    """
    columns = sorted({block for counts in history.values() for block in counts})
    figure = new_figure(min(9.5, 3.6 + 0.62 * len(columns)), 0.5 * len(history) + 1.0)
    axes = figure.subplots()
    before: Mapping[int, int] = {}
    for y, counts in enumerate(history.values()):
        for x, block in enumerate(columns):
            count = counts.get(block, 0)
            shade, freed = _COUNTS[min(count, 2)], before.get(block, 0) and not count
            axes.bar(x, 0.84, 0.9, bottom=y + 0.08, color=shade, edgecolor=PALETTE[5] if freed else GRID,
                     linewidth=2.2 if freed else 0.8)  # fmt: skip
            word = str(count) if count else "free"
            axes.text(x, y + 0.5, word, ha="center", va="center", fontsize=10, color=ink_on(shade),
                      fontweight="bold" if count > 1 or freed else None)  # fmt: skip
        before = counts
    style(axes, "Tables that map each block (framed: just came free)", "block", "")
    axes.set_xticks(range(len(columns)), [str(block) for block in columns])
    axes.set_yticks([y + 0.5 for y in range(len(history))], list(history))
    axes.set_ylim(len(history), 0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def block_contents(states: Mapping[str, Mapping[str, Sequence[str]]], size: int) -> Figure:
    """What the slots of some blocks hold, a column of blocks for each state.

    states: title → {what is written beside a block: the words in its slots, in order, as many as are filled}.
    """
    most = max(len(held) for held in states.values())
    figure = new_figure(9.6, 0.95 * most + 0.75)
    for axes, (title, held) in zip(
        figure.subplots(1, len(states), squeeze=False)[0], states.items(), strict=True
    ):  # fmt: skip
        for y, (label, words) in enumerate(held.items()):
            for slot in range(size):
                word = words[slot] if slot < len(words) else ""
                shade = _shade(word)
                axes.bar(slot, 0.52, 1, bottom=y + 0.4, align="edge", color=shade, edgecolor=GRID)
                axes.text(slot + 0.5, y + 0.66, word, ha="center", va="center", fontsize=9.5, color=ink_on(shade))
            axes.plot([0, 0, size, size, 0], [y + 0.4, y + 0.92, y + 0.92, y + 0.4, y + 0.4], color=INK, linewidth=1.4)
            axes.text(0, y + 0.34, label, ha="left", va="bottom", fontsize=9.5, color=INK)
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
        axes.set_xlim(-0.15, size + 0.5)
        axes.set_ylim(most, 0)
        axes.set_axis_off()
    return figure


def _shade(word: str) -> str:
    """Colour of a slot by who wrote it, the word's first letter: A has the first. Small letters: the common prompt."""
    if not word:
        return PAPER
    return GRID if word[0].islower() else PALETTE[(ord(word[0]) - ord("A")) % len(PALETTE)]


def branch_trees(trees: Mapping[str, tuple[int, int, int]]) -> Figure:
    """Stem and branches to scale, in blocks. trees: title → (branches, shared blocks, own blocks of each)."""
    lines = sum(count for count, _, _ in trees.values())
    figure = new_figure(9.2, 0.23 * lines + 0.42 * len(trees) + 0.9)
    counts = [count for count, _, _ in trees.values()]
    panels = figure.subplots(len(trees), 1, sharex=True, squeeze=False, height_ratios=counts)[:, 0]
    longest = max(shared + own for _, shared, own in trees.values())
    for axes, (title, (count, shared, own)) in zip(panels, trees.items(), strict=True):
        middle = (count - 1) / 2
        if shared:
            axes.barh(middle, shared, 0.8, color=PALETTE[0])
            axes.text(shared / 2, middle, f"{shared} blocks, there once", ha="center", va="center", fontsize=9.5,
                      color=ink_on(PALETTE[0]))  # fmt: skip
        for y in range(count):
            shade = PALETTE[1 + y % 3]
            if shared:
                axes.plot([shared, shared + 0.9], [middle, y], color=INK, linewidth=1.1)
            start = shared + (0.9 if shared else 0)
            axes.barh(y, own, 0.72, left=start, color=shade)
            axes.text(start + own + 0.5, y, f"+ {own}" if shared else f"{own}", va="center", fontsize=9, color=INK)
        style(axes, title, "", "")
        axes.set_yticks([])
        axes.set_ylim(count - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, longest * 1.09)
    panels[-1].set_xlabel("blocks along one branch", color=INK)
    return figure


def release_line(returned: float, freed: float, free: tuple[int, int], unit: str = "ms", what: str = "") -> Figure:
    """An abort in time: accepted, then the submitted step still runs, then the blocks are free.

    returned, freed: when the call came back, and when the blocks were seen free. free: free blocks before and after.
    """
    figure = new_figure(9.2, 2.9)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1])
    end = freed * 1.3
    above.barh(0, max(returned, end * 0.004), 0.6, color=PALETTE[5])
    above.text(returned + end * 0.01, 0, f"abort returns: {returned:.3g} {unit}", va="center", color=INK)
    above.barh(1, freed, 0.6, color=PALETTE[0])
    above.text(freed / 2, 1, "the submitted step still reads the blocks", ha="center", va="center", fontsize=9.5,
               color=ink_on(PALETTE[0]))  # fmt: skip
    style(above, what, "", "")
    above.set_yticks([])
    above.set_ylim(1.5, -0.5)
    (before, after), rise = free, free[1] - free[0]
    below.step([0, freed, end], [before, after, after], where="post", color=PALETTE[2], linewidth=2.4)
    below.text(end * 0.01, before + rise * 0.1, f"{before}", va="bottom", color=INK)
    note = f"{after}: {rise} more at {freed:.3g} {unit}"
    below.text(freed - end * 0.01, after, note, ha="right", va="center", color=INK)
    style(below, "", f"{unit} since abort was called", "free blocks")
    below.set_ylim(max(0, before - rise * 0.4), after + rise * 0.35)
    below.set_xlim(0, end)
    return figure
