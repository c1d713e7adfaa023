"""KV memory as slots: stretches and blocks of requests, waste against block size, the way through a block table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE = "#EFEFEA"


class Area(NamedTuple):
    """Slots side by side that were given out together. owner: "A", or "A B" where two share it; "" is free memory."""

    owner: str
    used: int
    size: int


def stretches(lengths: Mapping[str, int], size: int) -> list[Area]:
    """One stretch of `size` slots for every request. lengths: request → tokens."""
    return [Area(name, length, size) for name, length in lengths.items()]


def blocks(lengths: Mapping[str, int], size: int, sharers: Sequence[str] = (), prefix: int = 0) -> list[Area]:
    """Blocks of `size` slots; the full blocks of the first `prefix` tokens are there once for all `sharers`."""
    areas: list[Area] = []
    for name, length in lengths.items():
        full = prefix // size if name in sharers else 0
        if full and name == sharers[0]:
            areas += [Area(" ".join(sharers), size, size)] * full
        for start in range(full * size, length, size):
            areas.append(Area(name, min(size, length - start), size))
    return areas


def allocation(panels: Mapping[str, Iterable[Area]], names: str = "ABCDEFG") -> Figure:
    """A line of areas for every panel, slot by slot: filled where a token's KV lies, hatched where nothing ever will.

    names: all requests, in the order of their colours.
    """
    lines = {title: list(areas) for title, areas in panels.items()}
    longest = max(sum(area.size for area in areas) for areas in lines.values())
    figure = new_figure(9.6, 1.15 * len(lines) + 0.3)
    axes_of = figure.subplots(len(lines), 1, squeeze=False)[:, 0]
    for axes, (title, areas) in zip(axes_of, lines.items(), strict=True):
        left = 0
        for area in areas:
            _area(axes, left, area, names)
            left += area.size
        axes.set_xlim(-0.5, longest + 0.5)
        axes.set_ylim(0, 1.05)
        axes.set_axis_off()
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    return figure


def _area(axes: Any, left: int, area: Area, names: str) -> None:
    owners = area.owner.split()
    shade = PALETTE[names.index(owners[0])] if owners else FREE
    if not owners:
        axes.bar(left, 0.8, area.size, align="edge", color=FREE, edgecolor=GRID)
        axes.text(left + area.size / 2, 0.4, "free", ha="center", va="center", fontsize=8.5, color=INK)
        return
    for slot in range(area.size):
        filled = slot < area.used
        axes.bar(
            left + slot, 0.8, 1, align="edge", color=shade if filled else PAPER, edgecolor=PAPER if filled else shade,
            linewidth=0.5, hatch=None if filled else "////",
        )  # fmt: skip
    axes.plot(
        [left, left, left + area.size, left + area.size, left], [0, 0.8, 0.8, 0, 0], color=INK, linewidth=1.4,
        solid_joinstyle="miter",
    )  # fmt: skip
    if len(owners) > 1:  # the other users of a shared block, as stripes along its foot
        for i, owner in enumerate(owners[1:]):
            axes.bar(left, 0.17, area.size, bottom=0.17 * i, align="edge", color=PALETTE[names.index(owner)])
    if area.used:
        axes.text(
            left + area.used / 2, 0.52 if len(owners) > 1 else 0.4, area.owner.replace(" ", "+"), ha="center",
            va="center", fontsize=9, fontweight="bold", color=ink_on(shade),
        )  # fmt: skip


def waste_and_entries(
    sizes: Sequence[int], unused: Sequence[int], entries: Sequence[int], bound: Sequence[int], mark: int
) -> Figure:
    """Unused slots with the bound they never reach, and table entries, against the block size; one size is marked."""
    figure = new_figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    at = list(sizes).index(mark)
    left.plot(sizes, bound, "--", color=PALETTE[5], linewidth=1.4)
    left.text(sizes[0], bound[-1], "dashed: all but one slot of every last block", fontsize=9, color=PALETTE[5])
    for axes, values, shade in ((left, unused, PALETTE[0]), (right, entries, PALETTE[2])):
        axes.plot(sizes, values, "o-", color=shade, linewidth=1.8, markersize=4)
        axes.plot(mark, values[at], "o", color=shade, markersize=11, markerfacecolor="none", markeredgewidth=2)
        axes.annotate(f"{values[at]}", (mark, values[at]), (9, 8), textcoords="offset points", color=INK,
                      fontweight="bold")  # fmt: skip
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        axes.set_ylim(0, max(*values, *(bound if axes is left else [])) * 1.12)
    style(left, f"unused slots: {unused[at]} at block size {mark}", "block size (slots)", "slots")
    style(right, f"table entries: {entries[at]} at block size {mark}", "block size (slots)", "entries")
    return figure


def through_the_table(table: Sequence[int], size: int, length: int, position: int, num_blocks: int) -> Figure:
    """Reading order on the left, memory on the right, an arrow for every table entry; one token is followed."""
    figure = new_figure(9, 0.62 * max(len(table), num_blocks) + 1.3)
    axes = figure.subplots()
    axes.set_axis_off()
    logical = {block: i for i, block in enumerate(table)}
    right = size + 5
    for i, block in enumerate(table):
        _cells(axes, 0, i, size, [i * size + j for j in range(size)], length, position)
        axes.text(-0.3, i + 0.4, f"logical {i}", ha="right", va="center", color=INK)
        axes.annotate(
            "", (right - 0.25, block + 0.4), (size + 0.25, i + 0.4),
            arrowprops={"arrowstyle": "->", "color": INK, "linewidth": 2.4 if i == position // size else 1.1},
        )  # fmt: skip
    for block in range(num_blocks):
        held = range(logical[block] * size, (logical[block] + 1) * size) if block in logical else ()
        _cells(axes, right, block, size, held, length, position)
        axes.text(right + size + 0.3, block + 0.4, f"physical {block}", ha="left", va="center", color=INK)
    slot = table[position // size] * size + position % size
    axes.set_title(
        f"position {position} = logical block {position // size}, offset {position % size}  →  "
        f"physical block {table[position // size]}, slot {slot}", loc="left", fontsize=11, color=INK,
    )  # fmt: skip
    axes.set_xlim(-3.2, right + size + 4)
    axes.set_ylim(max(len(table), num_blocks) + 0.1, -0.2)
    return figure


def _cells(axes: Any, x: int, y: int, size: int, positions: Sequence[int], length: int, follow: int) -> None:
    for offset in range(size):
        position = positions[offset] if positions else None
        filled = position is not None and position < length
        shade = (PALETTE[1] if position == follow else PALETTE[0]) if filled else (PAPER if positions else FREE)
        axes.bar(x + offset, 0.8, 1, bottom=y, align="edge", color=shade, edgecolor=GRID)
        if filled:
            axes.text(x + offset + 0.5, y + 0.4, f"{position}", ha="center", va="center", fontsize=9.5,
                      color=ink_on(shade), fontweight="bold" if position == follow else None)  # fmt: skip
    axes.plot([x, x, x + size, x + size, x], [y, y + 0.8, y + 0.8, y, y], color=INK, linewidth=1.4)
