"""Pictures of a timeline: who computes when, how full the KV pool is, how many wait.

Each function returns a matplotlib Figure and leaves no global state behind. The background is transparent and what
is written is mid-grey, so that the same picture reads in a light and in a dark notebook. Two colours, vermilion and
blue of the Okabe-Ito palette: told apart by every kind of colour vision, and by lightness in print.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_engine.analysis import longest_gap
from mini_engine.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREFILL, DECODE, GREY = "#D55E00", "#0072B2", "#808080"
MAX_LANES = 40
_MAX_POINTS = 1500


def gantt(timelines: Timeline | Mapping[str, Timeline]) -> Figure:
    """A lane for each request, a bar for each round it takes part in; several timelines, by title, share one scale.

    Grey is waiting. The longest gap between two output tokens is marked. Raises ValueError for a run that did not keep
    its chunks, or that has more requests than lanes fit.
    """
    named = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    for timeline in named.values():
        if timeline.rounds and not timeline.rounds[0].chunks:
            raise ValueError("this run kept no chunks: simulate(…, keep_chunks=True) does")
        if len(timeline.requests) > MAX_LANES:
            raise ValueError(f"{len(timeline.requests)} requests do not fit a Gantt chart of at most {MAX_LANES} lanes")
    lanes = [len(timeline.requests) for timeline in named.values()]
    panels = _panels([0.36 * n + 0.75 for n in lanes])
    unit, scale = _time_unit(max((timeline.end for timeline in named.values()), default=0.0))
    right = max((timeline.end for timeline in named.values()), default=0.0) * scale
    for axes, (title, timeline) in zip(panels, named.items(), strict=True):
        _draw_lanes(axes, timeline, scale, right)
        text = f"{timeline.duration * scale:,.1f} {unit} in all, longest gap {timeline.longest_gap * scale:,.1f} {unit}"
        axes.set_title(f"{title}: {text}" if title else text, loc="left", fontsize=10, color=GREY)
        axes.set_xlim(0, right * 1.01 or 1)
    panels[-1].set_xlabel(f"time ({unit})", color=GREY)
    _keys(panels[0], {"prefill": PREFILL, "decode": DECODE, "waiting": GREY})
    return panels[0].figure  # type: ignore[return-value]


def kv_occupancy(timeline: Timeline) -> Figure:
    """KV blocks in use over time, with the peak and every preemption marked."""
    (axes,) = _panels([2.6])
    unit, scale = _time_unit(timeline.end)
    usable = timeline.config.num_blocks - 1
    times, used = _envelope(timeline, [round_.used_blocks for round_ in timeline.rounds])
    axes.fill_between(times * scale, used, step="post", color=DECODE, alpha=0.25, linewidth=0)
    axes.step(times * scale, used, where="post", color=DECODE, linewidth=1.4)
    top = max(float(used.max(initial=0)), 1.0)
    if used.size and timeline.rounds:
        peak = max(timeline.rounds, key=lambda round_: round_.used_blocks)
        text = f"peak {peak.used_blocks:,} of {usable:,} blocks ({peak.used_blocks / usable:.1%})"
        _point_at(axes, peak.start * scale, peak.used_blocks, text, timeline.end * scale)
    preempted = [round_ for round_ in timeline.rounds if round_.num_preempted]
    if preempted:
        axes.plot(
            [round_.start * scale for round_ in preempted],
            [round_.used_blocks for round_ in preempted],
            "v",
            color=PREFILL,
            label=f"preemption ({sum(round_.num_preempted for round_ in preempted)})",
        )
        axes.legend(frameon=False, labelcolor=GREY, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    axes.set_ylim(0, top * 1.22)
    axes.set_ylabel(f"KV blocks in use\n({timeline.config.block_size} tokens each)", color=GREY)
    axes.set_xlabel(f"time ({unit})", color=GREY)
    return axes.figure  # type: ignore[return-value]


def queue(timeline: Timeline) -> Figure:
    """Requests running and requests waiting over time, as the scheduler left them in each round."""
    (axes,) = _panels([2.6])
    unit, scale = _time_unit(timeline.end)
    series = {
        "running": (DECODE, [round_.num_running for round_ in timeline.rounds]),
        "waiting": (PREFILL, [round_.num_waiting for round_ in timeline.rounds]),
    }
    for colour, values in series.values():
        times, shown = _envelope(timeline, values)
        # Where both are equal, the thinner line shows on top of the thicker.
        axes.step(times * scale, shown, where="post", color=colour, linewidth=2.6 if colour == DECODE else 1.4)
    _keys(axes, {name: colour for name, (colour, _) in series.items()})
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.set_ylabel("requests", color=GREY)
    axes.set_xlabel(f"time ({unit})", color=GREY)
    return axes.figure  # type: ignore[return-value]


def to_svg(figure: Figure) -> str:
    """The figure as SVG text; the same figure gives the same text, so that stored notebooks do not change."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "timeline"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _draw_lanes(axes: Axes, timeline: Timeline, scale: float, right: float) -> None:
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for round_ in timeline.rounds:
        for chunk in round_.chunks:
            prefill = chunk.start < timeline.requests[chunk.request].request.num_prompt_tokens
            span = (round_.start * scale, (round_.end - round_.start) * scale)
            bars.setdefault((chunk.request, PREFILL if prefill else DECODE), []).append(span)
            if prefill and span[1] > 0.05 * right:
                text = dict(ha="center", va="center", fontsize=8, color="white", zorder=3)
                axes.text(span[0] + span[1] / 2, chunk.request, f"{chunk.num_tokens:,}", **text)  # type: ignore[arg-type]
    for (lane, colour), spans in bars.items():
        # A hairline at the right edge of each bar parts the rounds, whatever the background is.
        gap = 0.0015 * right
        axes.broken_barh(
            [(start, max(width - gap, width / 2)) for start, width in spans], (lane - 0.34, 0.68), facecolors=colour
        )
    for record in timeline.requests:
        until = record.metrics.scheduled if record.metrics.scheduled is not None else timeline.end
        axes.plot([record.metrics.arrival * scale, until * scale], [record.index] * 2, color=GREY, linewidth=2.5)
        axes.plot(record.metrics.arrival * scale, record.index, "|", color=GREY, markersize=9, markeredgewidth=1.6)
    axes.set_yticks(range(len(timeline.requests)), [record.request.request_id for record in timeline.requests])
    axes.set_ylim(len(timeline.requests) - 0.4, -0.65)
    _mark_longest_gap(axes, timeline, scale)


def _mark_longest_gap(axes: Axes, timeline: Timeline, scale: float) -> None:
    record = max(timeline.requests, key=lambda record: longest_gap(record.metrics), default=None)
    if record is None or not record.metrics.itl:
        return
    times = record.metrics.token_times
    first = max(range(len(times) - 1), key=lambda i: times[i + 1] - times[i])
    left, right, height = times[first] * scale, times[first + 1] * scale, record.index - 0.46
    axes.plot([left, left, right, right], [height + 0.1, height, height, height + 0.1], color=GREY, linewidth=1.6)


def _envelope(timeline: Timeline, values: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Start times of rounds and values, closed with a 0 at the end; of many rounds, the maximum in each time bin."""
    starts = np.array([round_.start for round_ in timeline.rounds])
    array = np.array(values, dtype=float)
    if len(starts) > _MAX_POINTS:
        bins = np.minimum(
            ((starts - starts[0]) / (timeline.end - starts[0]) * _MAX_POINTS).astype(int), _MAX_POINTS - 1
        )
        first = np.flatnonzero(np.diff(bins, prepend=-1))
        starts, array = starts[first], np.maximum.reduceat(array, first)
    return np.append(starts, timeline.end), np.append(array, 0.0)


def _time_unit(end: float) -> tuple[str, float]:
    return ("ms", 1e3) if end < 10 else ("s", 1.0)


def _panels(heights: list[float]) -> list[Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, sum(heights) + 0.5), layout="constrained")
    figure.patch.set_alpha(0)
    grid: Any = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)
    panels = list(grid[:, 0])
    for axes in panels:
        axes.patch.set_alpha(0)
        axes.tick_params(colors=GREY, labelsize=9)
        axes.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(GREY)
    return panels


def _keys(axes: Axes, colours: Mapping[str, str]) -> None:
    """Words in the colour they name, at the top right."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    words: list[Any] = [
        TextArea(f"■ {name}", textprops={"color": colour, "fontsize": 9}) for name, colour in colours.items()
    ]
    packed = HPacker(children=words, sep=10, pad=0)
    axes.add_artist(
        AnchoredOffsetbox(
            "lower right", child=packed, frameon=False, bbox_to_anchor=(1, 1), bbox_transform=axes.transAxes, pad=0.2
        )
    )


def _point_at(axes: Axes, x: float, y: float, text: str, right: float) -> None:
    side = "right" if x > right / 2 else "left"
    offset = (-8 if side == "right" else 8, 8)
    axes.plot(x, y, "o", color=DECODE, markersize=4)
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", color=GREY, fontsize=9, ha=side)
