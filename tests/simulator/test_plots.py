"""Pictures: that they show what the timeline holds. How they look, a person has to see."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mini_engine.analysis import BOOK_STEP
from mini_engine.simulator import Timeline, book_policies, book_requests, plots, poisson_arrivals, simulate
from tests.simulator.helpers import config


def book(policy: str = "continuous") -> Timeline:
    return simulate(book_requests(), book_policies()[policy], BOOK_STEP)


def many() -> Timeline:
    requests = poisson_arrivals(150, 40.0, [60, 120], [40, 60], seed=4)
    return simulate(requests, config(num_blocks=60, max_num_batched_tokens=128), BOOK_STEP)


def bars(axes: object, colour: str) -> list[tuple[float, float]]:
    """(left, lane) of every bar of a colour."""
    from matplotlib.colors import to_hex

    return sorted(
        (round(path.vertices[:, 0].min(), 1), round(path.vertices[:, 1].mean()))
        for collection in axes.collections  # type: ignore[attr-defined]
        if to_hex(collection.get_facecolor()[0]).upper() == colour
        for path in collection.get_paths()
    )


def test_the_gantt_has_a_bar_for_every_chunk_at_its_time():
    timeline = book()
    axes = plots.gantt(timeline).axes[0]
    for colour, prefill in ((plots.PREFILL, True), (plots.DECODE, False)):
        expected = sorted(
            (round(round_.start * 1e3, 1), chunk.request)
            for round_ in timeline.rounds
            for chunk in round_.chunks
            if (chunk.start < timeline.requests[chunk.request].request.num_prompt_tokens) == prefill
        )
        assert bars(axes, colour) == expected
    assert axes.get_title(loc="left") == "765.6 ms in all, longest gap 376.0 ms"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["r0", "r1", "r2", "r3"]


def test_several_gantts_share_one_scale():
    figure = plots.gantt({policy: book(policy) for policy in book_policies()})
    assert [axes.get_title(loc="left").split(" ms")[0] for axes in figure.axes] == [
        "fixed: 870.5",
        "continuous: 765.6",
        "chunked: 844.3",
    ]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1 and figure.axes[0].get_xlim()[1] > 870
    assert figure.axes[-1].get_xlabel() == "time (ms)"


def test_a_gantt_needs_chunks_and_few_requests():
    with pytest.raises(ValueError, match="keep_chunks"):
        plots.gantt(simulate(book_requests(), book_policies()["fixed"], BOOK_STEP, keep_chunks=False))
    with pytest.raises(ValueError, match="150 requests"):
        plots.gantt(many())


def test_the_occupancy_shows_the_peak_and_the_preemptions():
    timeline = many()
    assert len(timeline.rounds) > 500 and timeline.stats.num_preemptions > 0
    axes = plots.kv_occupancy(timeline).axes[0]
    (curve, *_), marks = axes.lines, axes.lines[-1]
    assert max(curve.get_ydata()) == timeline.stats.peak_used_blocks
    assert len(marks.get_xdata()) == sum(round_.num_preempted > 0 for round_ in timeline.rounds)
    assert f"peak {timeline.stats.peak_used_blocks} of 59 blocks" in [text.get_text() for text in axes.texts][0]
    assert "blocks" in axes.get_ylabel() and axes.get_xlabel() in ("time (s)", "time (ms)")


def test_the_queue_shows_running_and_waiting():
    timeline = many()
    axes = plots.queue(timeline).axes[0]
    running, waiting = axes.lines
    assert max(running.get_ydata()) == max(round_.num_running for round_ in timeline.rounds)
    assert max(waiting.get_ydata()) == max(round_.num_waiting for round_ in timeline.rounds)


def test_thinning_keeps_every_peak_of_a_long_run(monkeypatch):
    timeline = many()
    monkeypatch.setattr(plots, "_MAX_POINTS", 20)
    curve = plots.queue(timeline).axes[0].lines[1]
    assert len(curve.get_xdata()) <= 21
    assert max(curve.get_ydata()) == max(round_.num_waiting for round_ in timeline.rounds)


@pytest.mark.parametrize("draw", [plots.gantt, plots.kv_occupancy, plots.queue])
def test_pictures_are_transparent_and_grey_and_repeat_themselves(draw):
    svg = plots.to_svg(draw(book()))
    assert svg == plots.to_svg(draw(book()))
    assert "<dc:date>" not in svg
    colours = {colour.upper() for colour in re.findall(r"(?:fill|stroke): (#[0-9a-fA-F]{6})", svg)}
    assert colours <= {plots.PREFILL, plots.DECODE, plots.GREY, "#FFFFFF"}


@pytest.mark.parametrize("draw", [plots.gantt, plots.kv_occupancy, plots.queue])
def test_an_empty_run_can_be_drawn(draw):
    plots.to_svg(draw(simulate([], config(), BOOK_STEP)))


def test_matplotlib_is_loaded_when_something_is_drawn_and_pyplot_never():
    script = (
        "import sys\n"
        "from mini_engine.analysis import BOOK_STEP\n"
        "from mini_engine.simulator import book_policies, book_requests, simulate\n"
        "from mini_engine.simulator import plots, cli\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "plots.to_svg(plots.gantt(simulate(book_requests(), book_policies()['fixed'], BOOK_STEP)))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
