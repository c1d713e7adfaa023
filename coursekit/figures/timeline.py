"""Requests in time: segments to scale against a deadline, tokens as a staircase, who sits in which row.

Works on `RequestMetrics` (worked out, simulated or measured alike) and on the simulator's `Timeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import GRID, INK, PALETTE, PAPER, ink_on, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUEUE, PREFILL, DECODE, STALL = "#8C8C88", "#D55E00", "#0072B2", "#E69F00"
_STATES = {"waiting": QUEUE, "prefill": PREFILL, "decode": DECODE}


def life_lines(requests: Mapping[str, Any], deadline_s: float, zoom_s: tuple[float, float] | None = None) -> Figure:
    """One line a request, to scale: queue, prefill, decode, and every gap longer than usual; the deadline as a line.

    requests: name → RequestMetrics. zoom_s: (from, to) seconds shown again below, wide.
    """
    figure = new_figure(9, 0.62 * len(requests) * (2 if zoom_s else 1) + 1.6)
    panels = figure.subplots(2 if zoom_s else 1, 1, squeeze=False)[:, 0]
    end = max([deadline_s, *(request.token_times[-1] for request in requests.values())])
    for axes in panels:
        for y, request in enumerate(requests.values()):
            _draw_line(axes, y, request)
        axes.axvline(deadline_s, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
        axes.set_yticks(range(len(requests)), list(requests))
        axes.set_ylim(len(requests) - 0.45, -0.55)
    whole = panels[0]
    whole.set_xlim(0, end * 1.1)
    for y, request in enumerate(requests.values()):
        whole.text(end * 1.02, y, f"{request.token_times[-1]:.2f} s", va="center", color=INK)
    style(whole, f"deadline {deadline_s:g} s (dashed)", "seconds since arrival", "")
    keys(whole, {"queue": QUEUE, "prefill": PREFILL, "decode": DECODE, "a longer gap": STALL})
    if zoom_s:
        style(panels[1], f"the same, around the deadline of {deadline_s:g} s", "seconds since arrival", "")
        panels[1].set_xlim(*zoom_s)
    return figure


def _draw_line(axes: Any, y: int, request: Any) -> None:
    begin, first, last = request.arrival, request.token_times[0], request.token_times[-1]
    scheduled = request.scheduled if request.scheduled is not None else first
    bars = [(begin, scheduled, QUEUE), (scheduled, first, PREFILL), (first, last, DECODE)]
    usual = median(request.itl) if request.itl else 0.0
    pairs = zip(request.token_times, request.token_times[1:], strict=False)
    bars += [(left, right, STALL) for left, right in pairs if right - left > 1.5 * usual]
    for left, right, shade in bars:
        axes.barh(y, right - left, 0.56, left=left, color=shade)


def token_stairs(requests: Mapping[str, Any], objective: Any = None) -> Figure:
    """Tokens received over time: the start of a stair is the TTFT, its longest step is marked.

    objective: limits of an `Objective`; a total or TTFT limit is drawn as a line.
    """
    figure = new_figure(8.4, 4.4)
    axes = figure.subplots()
    for index, (name, request) in enumerate(requests.items()):
        shade, times, gaps = PALETTE[index % len(PALETTE)], request.token_times, request.itl
        longest = max(gaps, default=0.0)
        label = f"{name}: TTFT {request.ttft * 1e3:,.0f} ms, longest gap {longest * 1e3:,.1f} ms, all {times[-1]:.2f} s"
        counts = range(1, len(times) + 1)
        axes.step([request.arrival, *times], [0, *counts], where="post", color=shade, linewidth=1.8, label=label)
        if gaps:
            at = gaps.index(longest)
            axes.plot(times[at : at + 2], [at + 1, at + 1], color=shade, linewidth=5, solid_capstyle="butt")
        above = (0, 3 + 11 * index)  # at heights of their own: stairs that end together do not hide each other's name
        axes.annotate(name, (times[-1], len(times)), above, textcoords="offset points", ha="center", color=INK)
    tallest = max(len(request.token_times) for request in requests.values())
    end = max(request.token_times[-1] for request in requests.values())
    for limit, word in ((objective and objective.total_s, "deadline"), (objective and objective.ttft_s, "TTFT limit")):
        if limit:
            axes.plot([limit, limit], [0, tallest * 1.1], color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
            axes.text(limit, tallest * 0.02, f" {word} {limit:g} s", color=INK, fontsize=9)
    axes.set_xlim(0, end * 1.1)
    axes.set_ylim(0, tallest * 1.45)
    axes.legend(loc="upper left", frameon=False, fontsize=9, labelcolor=INK)
    style(axes, "Tokens that have reached the user; thick: the longest gap", "seconds since arrival", "tokens")
    return figure


def rows_and_states(timeline: Any) -> Figure:
    """Above: which request sits in which row of the batch, round by round. Below: the state of each request.

    timeline: a simulated run that kept its chunks, of few rounds.
    """
    records, rounds = timeline.requests, timeline.rounds
    figure = new_figure(9.4, 4.9)
    rows, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[timeline.config.max_num_seqs, len(records)])
    seats: list[int | None] = [None] * timeline.config.max_num_seqs
    for x, round_ in enumerate(rounds):
        present = {chunk.request: chunk for chunk in round_.chunks}
        seats = [who if who in present else None for who in seats]
        for who in present:
            if who not in seats:
                seats[seats.index(None)] = who
        for y, who in enumerate(seats):
            if who is None:
                rows.bar(x, 0.84, 0.94, bottom=y + 0.08, color=PAPER, edgecolor=GRID)
                continue
            shade = PALETTE[who % len(PALETTE)]
            rows.bar(x, 0.84, 0.94, bottom=y + 0.08, color=shade)
            text = f"{records[who].request.request_id}\n{present[who].num_tokens}"
            rows.text(x, y + 0.5, text, ha="center", va="center", fontsize=9, color=ink_on(shade))
        for y, record in enumerate(records):
            state = _state(record, present.get(record.index), round_)
            if state:
                lanes.bar(x, 0.7, 0.96, bottom=y + 0.15, color=_STATES[state])
    style(rows, "Rows of the batch: who sits there, and how many of its tokens this round computes", "", "row")
    rows.set_yticks([y + 0.5 for y in range(len(seats))], [str(y) for y in range(len(seats))])
    rows.invert_yaxis()
    style(lanes, "State of each request", "round", "request")
    lanes.set_yticks([y + 0.5 for y in range(len(records))], [record.request.request_id for record in records])
    lanes.set_ylim(len(records), 0)
    lanes.set_xticks(range(len(rounds)))
    keys(lanes, _STATES)
    return figure


def _state(record: Any, chunk: Any, round_: Any) -> str | None:
    """What a request is in during a round; None before it arrives and after it has finished."""
    if chunk is not None:
        return "prefill" if chunk.start < record.request.num_prompt_tokens else "decode"
    finished = record.metrics.finished is not None and record.metrics.finished <= round_.start
    return None if finished or record.request.arrival > round_.start else "waiting"


def keys(axes: Any, shades: Mapping[str, str]) -> None:
    """Words beside a patch of the colour they name, above the axes on the right; nothing for no words."""
    from matplotlib.patches import Patch

    if not shades:
        return
    axes.legend(
        handles=[Patch(color=shade, label=word) for word, shade in shades.items()], ncols=len(shades), frameon=False,
        loc="lower right", bbox_to_anchor=(1, 0.98), borderaxespad=0, fontsize=9, labelcolor=INK, handlelength=1.2,
    )  # fmt: skip
