"""Memory as pictures: an instance's ledger, which tokens enter the KV cache, what fits, a pool over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coursekit.compare import counted
from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style
from coursekit.figures.timeline import keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB, _MIB = 2**30, 2**20
_TERMS = {"weights": "#0072B2", "kv": "#E69F00", "activations": "#009E73", "buffers": "#56B4E9"}
_WORDS = {"weights": "weights", "kv": "KV", "activations": "activations", "buffers": "buffers"}


def ledger_bars(ledgers: Mapping[str, Any]) -> Figure:
    """One stacked bar a ledger, in GiB, its capacity as a line; what does not fit sticks out.

    ledgers: name → `analysis.Ledger`.
    """
    figure = new_figure(9, 0.8 * len(ledgers) + 1.1)
    axes = figure.subplots()
    unnamed: dict[str, str] = {}
    widest = max(max(ledger.used, ledger.capacity) for ledger in ledgers.values()) / _GIB
    for y, ledger in enumerate(ledgers.values()):
        left = 0.0
        for term, shade in _TERMS.items():
            size = getattr(ledger, term) / _GIB
            if size:
                axes.barh(y, size, 0.62, left=left, color=shade, edgecolor=PAPER)
                if not _inside(axes, left, size, y, f"{_WORDS[term]}\n{size:.1f}", widest, ink_on(shade)):
                    unnamed[_WORDS[term]] = shade
            left += size
        capacity = ledger.capacity / _GIB
        if ledger.free > 0:
            axes.barh(y, capacity - left, 0.62, left=left, color=PAPER, edgecolor=GRID, hatch="//")
            _inside(axes, left, capacity - left, y, f"free\n{capacity - left:.1f}", widest, INK)
        axes.plot([capacity] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=2)
        over = "" if ledger.fits else f", {-ledger.free / _GIB:.1f} too much"
        axes.text(max(left, capacity) + widest * 0.01, y, f"of {capacity:g} GiB{over}", va="center", color=INK)
    style(axes, "", "GiB", "")
    keys(axes, unnamed)
    axes.set_yticks(range(len(ledgers)), list(ledgers))
    axes.set_ylim(len(ledgers) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.22)
    return figure


def _inside(axes: Any, left: float, size: float, y: float, text: str, widest: float, ink: str) -> bool:
    """Write a label in its bar, where there is room for it; tell whether there was."""
    room = size > 0.01 * widest * max(len(line) for line in text.splitlines())
    if room:
        axes.text(left + size / 2, y, text, ha="center", va="center", fontsize=9, color=ink)
    return room


def tokens_in_kv(prompt: int, output: int, block_size: int) -> Figure:
    """Every token of a request as a square, blocks as frames: the last output token is in none of them."""
    tokens = prompt + output
    blocks = -(-(tokens - 1) // block_size)
    width = max(tokens, blocks * block_size)
    figure = new_figure(min(11.0, 0.56 * width + 1.2), 2.5)
    axes = figure.subplots()
    for x in range(width):
        shade = PAPER if x >= tokens - 1 else PALETTE[0] if x < prompt else PALETTE[1]
        axes.bar(x, 0.8, 0.84, bottom=0.1, color=shade, edgecolor=GRID)
        if x < tokens - 1:
            word = f"p{x + 1}" if x < prompt else f"o{x - prompt + 1}"
            axes.text(x, 0.5, word, ha="center", va="center", fontsize=9, color=ink_on(shade))
    for block in range(blocks):
        left = block * block_size - 0.5
        axes.plot([left, left, left + block_size, left + block_size, left], [0, 1, 1, 0, 0], color=INK, linewidth=1.6)
        axes.text(left + block_size / 2, -0.12, f"block {block + 1}", ha="center", va="top", fontsize=9, color=INK)
    last = tokens - 1
    axes.bar(last, 0.8, 0.84, bottom=1.35, color=PAPER, edgecolor=PALETTE[1], linewidth=1.6)
    axes.text(last, 1.75, f"o{output}", ha="center", va="center", fontsize=9, color=INK)
    axes.text(
        last - 0.6, 1.75, "drawn, returned, never fed back: no KV", ha="right", va="center", fontsize=9, color=INK
    )
    axes.set_xlim(-0.8, width - 0.2)
    axes.set_ylim(-0.5, 2.3)
    axes.set_axis_off()
    axes.set_title(
        f"{prompt} prompt + {output} output tokens: {tokens - 1} in KV, {blocks} blocks of {block_size}, "
        f"{blocks * block_size - tokens + 1} slots empty", loc="left", fontsize=11, color=INK,
    )  # fmt: skip
    return figure


def against_pool(loads: Mapping[str, int], pool_bytes: int) -> Figure:
    """What each load holds in MiB, against the pool. loads: name → bytes."""
    figure = new_figure(8.6, 0.62 * len(loads) + 1.1)
    axes = figure.subplots()
    for y, size in enumerate(loads.values()):
        shade = PALETTE[0] if size <= pool_bytes else PALETTE[5]
        axes.barh(y, size / _MIB, 0.6, color=shade)
        word = "fits" if size <= pool_bytes else "too much"
        axes.text(pool_bytes / _MIB * 0.01, y, f"{size / _MIB:,.0f} MiB, {word}", va="center", color=ink_on(shade))
    axes.axvline(pool_bytes / _MIB, color=INK, linewidth=1.6, linestyle=(0, (4, 2)))
    style(axes, f"The dashed line is the pool: {pool_bytes / _MIB:,.0f} MiB", "MiB of KV", "")
    axes.set_yticks(range(len(loads)), list(loads))
    axes.set_ylim(len(loads) - 0.5, -0.5)
    return figure


def capacity_curve(outputs: Sequence[int], fits: Mapping[str, Sequence[int]], mark: int) -> Figure:
    """Requests that fit against how many tokens each will generate. fits: name of a curve → a count for each output."""
    figure = new_figure(8.2, 3.8)
    axes = figure.subplots()
    for index, (name, counts) in enumerate(fits.items()):
        shade = PALETTE[index % len(PALETTE)]
        axes.step(outputs, counts, where="post", color=shade, linewidth=2)
        axes.annotate(name, (outputs[-1], counts[-1]), (4, 0), textcoords="offset points", va="center", color=INK)
        count = counts[max(i for i, output in enumerate(outputs) if output <= mark)]
        axes.plot(mark, count, "o", color=shade)
        axes.annotate(str(count), (mark, count), (4, 6), textcoords="offset points", color=INK)
    style(axes, "Requests that fit, with all they will generate", "output tokens of each request", "requests")
    axes.set_ylim(0, 1.08 * max(1, *(max(counts) for counts in fits.values())))
    axes.set_xlim(outputs[0], outputs[-1] * 1.3)
    return figure


def pool_over_time(timelines: Mapping[str, Any]) -> Figure:
    """Blocks in use over time, a panel a run, on one scale; a triangle where a request lost its blocks.

    timelines: name → the simulator's `Timeline`.
    """
    figure = new_figure(9, 2.3 * len(timelines) + 0.4)
    panels = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        rounds, pool = timeline.rounds, timeline.config.num_blocks - 1
        starts = [round_.start for round_ in rounds] + [timeline.end]
        used = [round_.used_blocks for round_ in rounds] + [0]
        axes.fill_between(starts, used, step="post", color=PALETTE[4], alpha=0.6, linewidth=0)
        axes.axhline(pool, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        for round_ in rounds:
            if round_.num_preempted:
                axes.plot(round_.start, round_.used_blocks, "v", color=PALETTE[5], markersize=9)
        peak = max(round_.num_running for round_ in rounds)
        style(
            axes, f"{name}: at most {peak} at a time, {counted(timeline.stats.num_preemptions, 'preemption')}, "
            f"{timeline.duration:.1f} s in all", "", "blocks in use",
        )  # fmt: skip
        axes.text(timeline.end, pool * 1.03, f"pool: {pool:,} blocks", ha="right", va="bottom", fontsize=9, color=INK)
        axes.set_ylim(0, pool * 1.2)
    panels[-1].set_xlabel("seconds on the virtual clock", color=INK)
    return figure
