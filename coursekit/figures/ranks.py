"""Which rank holds what (chapter 10): KV under tensor parallelism, tokens dealt out, shares of a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style
from mini_engine.context_shard import ContextShard

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SOFT = "#E9E9E4"  # a token that lies on another rank


def heads_and_tokens(ranks: int, kv_heads: int, size: int, length: int) -> list[tuple[int, list[int]]]:
    """For each rank its KV head and the tokens of it that it holds, with the context cut `size` ways.

    Only for at least as many ranks as KV heads, which copy each head alike often.
    """
    copies = ranks // kv_heads
    shards = [ContextShard(rank % size, size) for rank in range(ranks)]
    return [(rank // copies, [p for p in range(length) if shard.owns(p)]) for rank, shard in enumerate(shards)]


def kv_on_ranks(panels: Mapping[str, Sequence[tuple[int, Sequence[int]]]], length: int) -> Figure:
    """A line for each rank, a square for each token it holds, coloured and lettered by KV head.

    panels: title → for each rank (KV head, positions of the tokens it holds).
    """
    figure = new_figure(4.7 * len(panels), 3.3)
    for axes, (title, held) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for rank, (head, tokens) in enumerate(held):
            shade = PALETTE[head % len(PALETTE)]
            for position in range(length):
                _square(axes, position, rank, shade if position in tokens else SOFT)
            axes.text(length + 0.3, rank + 0.5, f"head {head}: {len(tokens)}", va="center", fontsize=8.5, color=INK)
        style(axes, title, "token of one request", "")
        axes.set_yticks([rank + 0.5 for rank in range(len(held))], [f"rank {rank}" for rank in range(len(held))])
        axes.set_xlim(0, length * 1.36)
        axes.set_xticks([0.5, length - 0.5], ["0", f"{length - 1}"])
        _quiet(axes, len(held))
    return figure


def dealt_out(size: int, interleave: int, block_size: int, length: int) -> Figure:
    """The first `length` positions as the pools of all ranks hold them: a line a rank, a column a slot of its own.

    A heavy line ends a block. What stands in a square is the token's position in the sequence.
    """
    shards = [ContextShard(rank, size, interleave) for rank in range(size)]
    columns = shards[0].blocks_for(length, block_size) * block_size
    figure = new_figure(max(5.0, 0.42 * columns + 2.4), 0.42 * size + 1.35)
    axes = figure.subplots()
    for rank, shard in enumerate(shards):
        shade = PALETTE[rank % len(PALETTE)]
        for k in range(columns):
            here = k < shard.local_length(length)
            _square(axes, k, rank, shade if here else PAPER)
            if here:
                axes.text(k + 0.5, rank + 0.5, f"{shard.global_position(k)}", ha="center", va="center", fontsize=8.5,
                          color=ink_on(shade))  # fmt: skip
        axes.text(
            columns + 0.25, rank + 0.5, f"{shard.local_length(length)} tokens", va="center", fontsize=9, color=INK
        )
    for edge in range(0, columns + 1, block_size):
        axes.plot([edge, edge], [0, size], color=INK, linewidth=1.6)
    title = f"{length} tokens over {size} rank{'s' * (size > 1)}, {interleave} at a time, blocks of {block_size}"
    style(axes, title, "k-th token of a rank's own; a heavy line ends a block", "")
    axes.set_yticks([rank + 0.5 for rank in range(size)], [f"rank {rank}" for rank in range(size)])
    axes.set_xticks([k + 0.5 for k in range(columns)], [str(k) for k in range(columns)], fontsize=8)
    axes.set_xlim(-0.1, columns + 3.2)
    _quiet(axes, size)
    return figure


def shares_of_parts(rules: Mapping[str, Sequence[float]], names: Sequence[str]) -> Figure:
    """Each part's weight in the result, a bar for each rule. rules: title → weights, which add up to 1."""
    figure = new_figure(8.6, 0.56 * len(rules) + 0.9)
    axes = figure.subplots()
    for y, weights in enumerate(rules.values()):
        left = 0.0
        for shade, name, weight in zip(PALETTE, names, weights, strict=False):
            axes.barh(y, weight, 0.72, left=left, color=shade, edgecolor=PAPER)
            if weight > 0.08:
                axes.text(left + weight / 2, y, f"{name}: {weight:.3f}", ha="center", va="center", fontsize=9,
                          color=ink_on(shade))  # fmt: skip
            left += weight
    style(axes, "How much each part weighs in the result", "weight", "")
    axes.set_yticks(range(len(rules)), list(rules))
    axes.set_ylim(len(rules) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    return figure


def _square(axes: Axes, x: float, y: float, shade: str) -> None:
    axes.bar(x, 0.86, 0.92, bottom=y + 0.07, align="edge", color=shade, edgecolor=GRID, linewidth=0.6)


def _quiet(axes: Axes, lines: int) -> None:
    axes.set_ylim(lines, 0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
