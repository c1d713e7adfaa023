"""Taking up a state where a model keeps more than KV: snapshots, their spacing, replayed windows and their error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coursekit.figures.prefixes import EQUAL, FOUND
from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mini_engine.analysis import Resumption


def recovery_line(matched: int, snapshots: Sequence[int], point: int) -> Figure:
    """A matched prefix, its snapshots, and what is computed again from the last one on. All in tokens."""
    figure = new_figure(9.4, 2.0)
    axes = figure.subplots()
    again = f"{matched - point:,} computed again" if matched > point else ""
    _spans(axes, 0, [(point, FOUND, "taken up from the snapshot"), (matched - point, EQUAL, again)])
    for position in snapshots:
        axes.plot(position, 0.5, "v", color=PALETTE[5], markersize=10)
        axes.text(position, 0.72, f"snapshot {position:,}", ha="center", fontsize=9, color=INK)
    axes.plot([matched] * 2, [-0.45, 0.62], color=INK, linewidth=1.6)
    axes.text(matched, 0.72, f"text matches to {matched:,}", ha="center", fontsize=9, color=INK)
    style(axes, "Text and state do not end at the same token", "token", "")
    axes.set_yticks([])
    axes.set_ylim(-0.5, 1.0)
    axes.set_xlim(0, max(matched, *snapshots) * 1.1)
    axes.spines["left"].set_visible(False)
    return figure


def spacing_tradeoff(
    spacings: Sequence[int], kept_mib: Sequence[float], recomputed: Sequence[float], mark: int
) -> Figure:
    """Memory for snapshots, and tokens computed again on average, against their spacing; one spacing is marked."""
    figure = new_figure(9.2, 3.4)
    panels = figure.subplots(1, 2)
    at = list(spacings).index(mark)
    said = ((kept_mib, "MiB for snapshots on each card", PALETTE[0]), (recomputed, "tokens computed again", PALETTE[5]))
    for axes, (values, name, shade) in zip(panels, said, strict=True):
        axes.plot(spacings, values, "o-", color=shade, linewidth=1.8, markersize=4)
        axes.plot(mark, values[at], "o", color=shade, markersize=11, markerfacecolor="none", markeredgewidth=2)
        axes.annotate(f"{values[at]:,.0f}", (mark, values[at]), (0, 10), textcoords="offset points", color=INK,
                      ha="center", fontweight="bold")  # fmt: skip
        style(axes, name, "tokens between two snapshots", "")
        axes.set_xscale("log", base=2)
        axes.set_xticks(spacings, [f"{s:,}" for s in spacings], fontsize=8, rotation=30)
        axes.minorticks_off()
        axes.set_ylim(0, max(values) * 1.15)
        axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def resume_paths(paths: Mapping[str, Resumption], cached: int) -> Figure:
    """What runs in each path: tokens of the prefix and new ones through the encoder, the last window through the
    decoder. Not to scale: a window is short beside a prefix."""
    figure = new_figure(9.6, 1.05 * len(paths) + 0.8)
    axes = figure.subplots()
    for y, path in enumerate(paths.values()):
        again = 0 if not path.encoder_replayed else 22 if path.encoder_replayed < cached else 82
        word = f"{path.encoder_replayed:,} again" if again else ""
        _spans(axes, y, [(82 - again, FOUND, "found" if again < 82 else ""), (again, EQUAL, word),
                        (22, PALETTE[0], f"{path.encoder_new:,} new")])  # fmt: skip
        axes.barh(y, 22, 0.62, left=118, color=PALETTE[3])
        axes.text(129, y, f"{path.decoder_replayed} tokens ×\n{path.decoder_layers} layers", ha="center", va="center",
                  fontsize=8.5, color="#000000")  # fmt: skip
    axes.text(0, -0.62, "encoder: the prefix, then what is new", fontsize=9.5, color=INK, va="bottom")
    axes.text(118, -0.62, "decoder", fontsize=9.5, color=INK, va="bottom")
    style(axes, "", "not to scale", "")
    axes.set_yticks(range(len(paths)), list(paths))
    axes.set_xticks([])
    axes.set_ylim(len(paths) - 0.45, -0.95)
    axes.set_xlim(0, 142)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return figure


def replay_errors(errors: Mapping[int, Any]) -> Figure:
    """Largest difference of the replayed state from the true one, by layer, a curve for each length of replay.

    errors: tokens replayed → [layers].
    """
    figure = new_figure(9, 3.4)
    axes = figure.subplots()
    ends: list[float] = []
    for index, (replayed, values) in enumerate(errors.items()):
        shade = (PALETTE[5], PALETTE[1], PALETTE[0], PALETTE[2])[index % 4]
        layers = range(1, len(values) + 1)
        axes.plot(layers, values, "o-", color=shade, linewidth=2, clip_on=False)
        place = float(values[-1])
        gap = 0.075 * max(float(max(each)) for each in errors.values())
        while any(abs(place - other) < gap for other in ends):
            place += gap
        ends.append(place)
        axes.text(len(values) + 0.12, place, f"{replayed} tokens replayed", va="center", fontsize=9, color=INK)
    style(axes, "The first layer is restored; those above are not", "layer", "largest difference in its state")
    axes.set_xlim(0.8, len(next(iter(errors.values()))) + 1.7)
    axes.set_ylim(-0.06 * max(float(max(each)) for each in errors.values()), None)
    axes.set_xticks(range(1, len(next(iter(errors.values()))) + 1))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    return figure


def _spans(axes: Any, y: float, parts: Sequence[tuple[int, str, str]]) -> int:
    """Bars one behind the other at height y, from (length, colour, word); returns where they end."""
    left = 0
    for tokens, shade, word in parts:
        if tokens:
            axes.barh(y, tokens, 0.62, left=left, color=shade, edgecolor=PAPER)
            axes.text(left + tokens / 2, y, word, ha="center", va="center", fontsize=9, color=ink_on(shade))
        left += tokens
    return left
