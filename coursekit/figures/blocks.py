"""The KV pool as a picture: a square for each block, coloured by owner, shared ones hatched, free ones in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, show, style

if TYPE_CHECKING:
    from ipywidgets import Widget
    from matplotlib.figure import Figure

    from mini_engine.pool_view import BlockView, PoolView

_MARKS = {"null": "null", "in flight": "in\nflight", "cached-free": "free,\nknown", "free": "free"}
_MOST_QUEUED = 12


def pool_grid(view: PoolView, owners: Sequence[str] = (), columns: int = 10) -> Figure:
    """Block ids in the corner; inside, who owns the block (or how many share it) and the slots it has filled.

    owners: the names in the order of their colours, so that a run keeps them; default those of this view.
    """
    names = list(owners) or list(view.tables)
    columns = min(columns, len(view.blocks))
    rows = -(-len(view.blocks) // columns)
    figure = new_figure(0.92 * columns + 0.4, 0.78 * rows + 1.1)
    axes = figure.subplots()
    for block in view.blocks:
        _square(axes, block, *divmod(block.block_id, columns)[::-1], names, view.block_size)
    queue = " ".join(map(str, view.free_queue[:_MOST_QUEUED])) + (" …" if len(view.free_queue) > _MOST_QUEUED else "")
    style(axes, f"step {view.step}: {view.num_references} references to {view.num_used} blocks", "", "")
    axes.set_xlabel(f"given out next: {queue or 'nothing is free'}", color=INK, loc="left")
    axes.set_xlim(-0.05, columns)
    axes.set_ylim(rows, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    return figure


def describe(view: PoolView) -> str:
    """The picture in words."""
    tables = "; ".join(
        f"{name} has blocks {' '.join(map(str, table)) or 'none'}" for name, table in view.tables.items()
    )
    shared = [str(block.block_id) for block in view.blocks if block.state == "shared"]
    flying = [str(block.block_id) for block in view.blocks if block.state == "in flight"]
    parts = [f"KV pool after step {view.step}: {view.num_used} of {len(view.blocks) - 1} blocks in use", tables]
    parts.append(f"shared: {' '.join(shared)}" if shared else "")
    parts.append(f"in flight: {' '.join(flying)}" if flying else "")
    parts.append(f"waiting: {', '.join(view.waiting)}" if view.waiting else "")
    parts.append(f"free, the next one first: {' '.join(map(str, view.free_queue)) or 'none'}")
    return "; ".join(part for part in parts if part) + "."


def owners_of(views: Sequence[PoolView]) -> list[str]:
    """Everyone who ever had a block, in order of appearance."""
    return list(dict.fromkeys(name for view in views for name in view.tables))


def pool_slider(views: Sequence[PoolView], columns: int = 10) -> Widget:
    """Leaf through a recorded run. For a page without widgets, show `pool_grid` of the steps that matter."""
    import ipywidgets as widgets

    names = owners_of(views)
    slider = widgets.IntSlider(value=0, min=0, max=len(views) - 1, description="step", continuous_update=False)

    def draw(step: int) -> None:
        show(pool_grid(views[step], names, columns), describe(views[step]))

    return widgets.VBox([slider, widgets.interactive_output(draw, {"step": slider})])


def _square(axes: Any, block: BlockView, column: int, row: int, names: Sequence[str], size: int) -> None:
    owned = bool(block.owners)
    shade = PALETTE[names.index(block.owners[0]) % len(PALETTE)] if owned and block.owners[0] in names else PAPER
    if block.state == "in flight":
        shade = GRID
    if len(block.owners) > 1:
        shade = "#B8B8B2"
    hatch = {"shared": "///", "in flight": "xx", "null": "\\\\"}.get(block.state)
    dashed = "--" if block.state == "cached-free" else "-"
    axes.bar(column, 0.9, 0.92, bottom=row + 0.05, align="edge", color=shade, edgecolor=INK if hatch else "#8A8A84",
             hatch=hatch, linewidth=0.8, linestyle=dashed)  # fmt: skip
    word = _MARKS.get(block.state) or (f"× {len(block.owners)}" if len(block.owners) > 1 else block.owners[0])
    box = {"facecolor": shade, "edgecolor": "none", "pad": 1.2}
    middle = {"ha": "center", "va": "center", "color": ink_on(shade), "bbox": box}
    axes.text(column + 0.46, row + 0.55, word, fontsize=8.5 if owned else 7.5, **middle)
    axes.text(column + 0.06, row + 0.2, str(block.block_id), fontsize=6.5, color=ink_on(shade), bbox=box)
    if owned:
        axes.text(column + 0.46, row + 0.82, f"{block.filled}/{size}", fontsize=6.5, **middle)
