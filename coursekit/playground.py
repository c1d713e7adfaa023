"""A scheduler to play with: edit a few requests and the scheduler's settings, and watch the Gantt chart change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coursekit.figures.show import show
from mini_engine.analysis import FittedStep
from mini_engine.config import SchedulerConfig
from mini_engine.errors import EngineError
from mini_engine.simulator import Request, Timeline, simulate
from mini_engine.simulator.plots import gantt

if TYPE_CHECKING:
    from ipywidgets import Widget

LONGEST, BLOCK = 32_768, 16


def describe(timeline: Timeline) -> str:
    """What a Gantt chart of this run shows, in words."""
    ends = ", ".join(
        f"{record.request.request_id} {record.metrics.token_times[-1] * 1e3:.0f}" for record in timeline.requests
    )
    return (
        f"Gantt chart of {len(timeline.requests)} requests in {len(timeline.rounds)} rounds, "
        f"{timeline.duration * 1e3:.1f} ms in all; the longest gap between two tokens is "
        f"{timeline.longest_gap * 1e3:.1f} ms; requests end at, in ms: {ends}."
    )


def play(table: Sequence[tuple[float, int, int]], config: SchedulerConfig, cost: FittedStep) -> Timeline:
    """Requests r0, r1, … from (arrival ms, prompt, output), by the real scheduler and a virtual clock."""
    requests = [Request(f"r{i}", ms / 1e3, prompt, output) for i, (ms, prompt, output) in enumerate(table)]
    return simulate(requests, config, cost)


def scheduler_playground(requests: Sequence[Request], config: SchedulerConfig, cost: FittedStep) -> Widget:
    """Widgets for every request (arrival, prompt, output) and for policy, rows, token budget and threshold.

    The chart is drawn anew whenever one of them is changed. Settings that are refused say why in its place.
    """
    import ipywidgets as widgets

    roomy = replace(config, max_model_len=2 * LONGEST, num_blocks=len(requests) * 2 * LONGEST // BLOCK + 1)
    table, fields = _request_table(widgets, requests)
    settings = _settings(widgets, roomy)

    def draw(**values: Any) -> None:
        rows = [tuple(values[f"{name}_{i}"] for name in ("arrival", "prompt", "output")) for i in range(len(requests))]
        chosen = {name: values[name] for name in settings}
        try:
            timeline = play(rows, replace(roomy, **chosen), cost)
        except EngineError as error:
            print(error)
        else:
            show(gantt(timeline), describe(timeline))

    chart = widgets.interactive_output(draw, {**fields, **settings})
    return widgets.VBox([widgets.HBox([table, widgets.VBox(list(settings.values()))]), chart])


def _request_table(widgets: Any, requests: Sequence[Request]) -> tuple[Widget, dict[str, Any]]:
    """A grid with a line for each request, and its fields by name."""
    fields: dict[str, Any] = {}
    cells = [widgets.HTML(f"<b>{head}</b>") for head in ("", "arrival (ms)", "prompt", "output")]
    for i, request in enumerate(requests):
        cells.append(widgets.HTML(f"<b>{request.request_id}</b>"))
        for name, value, least, most in (
            ("arrival", round(request.arrival * 1e3), 0, 60_000),
            ("prompt", request.num_prompt_tokens, 1, LONGEST),
            ("output", request.num_output_tokens, 1, 512),
        ):
            field = widgets.BoundedIntText(value=value, min=least, max=most, layout={"width": "95px"})
            field.continuous_update = False
            fields[f"{name}_{i}"] = field
            cells.append(field)
    return widgets.GridBox(cells, layout={"grid_template_columns": "40px 105px 105px 105px"}), fields


def _settings(widgets: Any, config: SchedulerConfig) -> dict[str, Any]:
    style, layout = {"description_width": "120px"}, {"width": "430px"}
    common: dict[str, Any] = {"style": style, "layout": layout, "continuous_update": False}
    return {
        "batching": widgets.ToggleButtons(
            options=["fixed", "continuous"], value=config.batching, description="batching", style=style
        ),
        "max_num_seqs": widgets.IntSlider(value=config.max_num_seqs, min=1, max=4, description="rows", **common),
        "max_num_batched_tokens": widgets.SelectionSlider(
            options=[2**k for k in range(6, 16)], value=config.max_num_batched_tokens, description="token budget",
            **common,
        ),
        "long_prefill_token_threshold": widgets.SelectionSlider(
            options=[("no limit", 0), *((str(2**k), 2**k) for k in range(14, 5, -1))],
            value=config.long_prefill_token_threshold, description="largest chunk", **common,
        ),
    }  # fmt: skip
