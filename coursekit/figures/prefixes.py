"""Prefixes as pictures: what of a prompt is found again, the tree of growing prompts, and what a pool let survive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style
from coursekit.figures.timeline import keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mini_engine.analysis import Turn

FOUND, EQUAL, OTHER = PALETTE[2], PALETTE[1], "#8C8C88"
"""Found in the cache; equal and computed all the same; computed because it is another text."""


def found_blocks(prompt: int, common: int, found: int, size: int) -> Figure:
    """A prompt as blocks in a row: found, equal but not found, different. All in tokens."""
    figure = new_figure(9.4, 2.2)
    axes = figure.subplots()
    parts = {
        "found": (0, found, FOUND),
        "equal, computed again": (found, common, EQUAL),
        "different, or behind a difference": (common, prompt, OTHER),
    }
    for name, (start, stop, shade) in parts.items():
        axes.bar(start, 0.9, stop - start, bottom=0.05, align="edge", color=shade)
        word, middle = f"{name}: {stop - start}", (start + stop) / 2
        if stop - start > prompt / 4:
            axes.text(middle, 0.5, word, ha="center", va="center", color=ink_on(shade), bbox=_label(shade))
        elif stop > start:
            axes.plot([middle, middle], [1, 1.12], color=INK, linewidth=1)
            side = "left" if middle < prompt / 3 else "right" if middle > prompt * 2 / 3 else "center"
            axes.text(middle, 1.16, word, ha=side, va="bottom", color=INK, fontsize=9)
    for edge in range(0, prompt + size, size):
        axes.plot([min(edge, prompt)] * 2, [0, 1], color=INK, linewidth=1.2 if size * 40 > prompt else 0.4)
    style(axes, f"{common} common tokens, blocks of {size}: {found} are found", "token of the new prompt", "")
    axes.set_yticks([])
    axes.set_ylim(0, 1.42)
    axes.set_xlim(0, prompt)
    axes.spines["left"].set_visible(False)
    return figure


def _label(shade: str) -> dict[str, Any]:
    """A patch under a word, so that the edges of blocks do not cross it."""
    return {"facecolor": shade, "edgecolor": "none", "pad": 2}


def round_tree(prompts: Sequence[int], kept: Sequence[int]) -> Figure:
    """Prompts that each keep the first `kept` tokens of the one before: a trunk, edges with new tokens, leaves with
    whole lengths. kept: of round 0 it is 0."""
    figure = new_figure(9.4, 0.5 * len(prompts) + 1.2)
    axes = figure.subplots()
    branches = [*kept[1:], prompts[-1]]  # where the next round leaves this one's path
    for y, (length, start, end) in enumerate(zip(prompts, kept, branches, strict=True)):
        axes.plot([start, end], [y, y], color=FOUND, linewidth=5, solid_capstyle="butt")
        if y:
            axes.plot([start, start], [y - 1, y], color=FOUND, linewidth=1.4)
        if end < length:  # a few tokens: too short to see without a mark
            axes.plot([end, length], [y, y], color=EQUAL, linewidth=5, solid_capstyle="butt")
            axes.plot(length, y, "o", color=EQUAL, markersize=7)
        note = f"+{end - start} new" + (f", then {length - end} of its own" if end < length else "")
        axes.text(start - max(prompts) * 0.012, y, f"round {y}: {note}", ha="right", va="center", fontsize=9, color=INK)
        axes.text(length + max(prompts) * 0.02, y, f"{length:,} in all", va="center", fontsize=9, color=INK)
    style(axes, f"All rounds begin with the same {branches[0]} tokens", "tokens from the root", "")
    axes.set_yticks([])
    axes.set_ylim(len(prompts) - 0.4, -0.7)
    axes.set_xlim(-max(prompts) * 0.4, max(prompts) * 1.17)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= max(prompts) * 1.1])
    axes.spines["left"].set_visible(False)
    return figure


def reusable_and_hit(prompts: Sequence[int], common: Sequence[int], hits: Mapping[str, Sequence[int]]) -> Figure:
    """A panel for each run: what each round had in common with the one before, and how much of that was found."""
    figure = new_figure(9.4, 2.3 * len(hits) + 0.3)
    panels = figure.subplots(len(hits), 1, sharex=True, squeeze=False)[:, 0]
    rounds = range(len(prompts))
    for axes, (name, found) in zip(panels, hits.items(), strict=True):
        axes.bar(rounds, prompts, 0.8, color=PAPER, edgecolor=OTHER)
        axes.bar(rounds, common, 0.8, color=EQUAL)
        axes.bar(rounds, found, 0.44, color=FOUND)
        style(axes, f"{name}: {sum(found):,} of {sum(prompts):,} prompt tokens found", "", "tokens")
        axes.set_ylim(0, max(prompts) * 1.1)
    keys(panels[0], {"in common with the round before": EQUAL, "found": FOUND})
    panels[-1].set_xticks(list(rounds))
    panels[-1].set_xlabel("round", color=INK)
    return figure


def hits_by_pool(
    pools: Sequence[int], hits: Mapping[str, Sequence[int]], total: int, marks: Sequence[int], title: str
) -> Figure:
    """Share of prompt tokens found against the pool's size in blocks, a curve for each way to play; pools marked."""
    figure = new_figure(9, 3.6)
    axes = figure.subplots()
    for index, (name, found) in enumerate(hits.items()):
        shade = (PALETTE[0], PALETTE[5], PALETTE[2])[index % 3]
        axes.plot(pools, [100 * each / total for each in found], "o-", markersize=4, color=shade, linewidth=2)
        middle = min(range(len(pools)), key=lambda i: abs(found[i] - max(found) / 2))
        axes.annotate(name, (pools[middle], 100 * found[middle] / total), (9, -14), textcoords="offset points",
                      color=shade)  # fmt: skip
    for mark in marks:
        axes.axvline(mark, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.text(mark, 97, f" {mark:,}", va="center", color=INK, fontsize=9)
    style(axes, title, "blocks in the pool", "% of prompt tokens found")
    axes.set_ylim(0, 104)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def ways_on(turns: Mapping[str, Turn]) -> Figure:
    """Ways to go on with a long history: tokens found, computed and generated before the answer can begin."""
    figure = new_figure(9.4, 0.72 * len(turns) + 1.2)
    axes = figure.subplots()
    shades = {"found": FOUND, "computed": PALETTE[0], "generated, one by one": PALETTE[5]}
    widest = 0
    for y, turn in enumerate(turns.values()):
        left = 0
        for count, shade in zip((turn.reused, turn.prefilled, turn.extra_generated), shades.values(), strict=True):
            axes.barh(y, count, 0.62, left=left, color=shade)
            if count > 500:
                axes.text(left + count / 2, y, f"{count:,}", ha="center", va="center", color=ink_on(shade))
            left += count
        axes.text(left + 100, y, f"then every token reads {turn.context:,}", va="center", fontsize=9, color=INK)
        widest = max(widest, left)
    style(axes, "Before the answer begins", "tokens", "")
    keys(axes, shades)
    axes.set_yticks(range(len(turns)), list(turns))
    axes.set_ylim(len(turns) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.38)
    return figure
