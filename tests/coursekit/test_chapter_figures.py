"""What the pictures of chapter 01 say in words and bars agrees with the figures they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coursekit.figures.beside import beside
from coursekit.figures.memory import against_pool, capacity_curve, ledger_bars, pool_over_time, tokens_in_kv
from coursekit.figures.timeline import PREFILL, QUEUE, STALL, life_lines, rows_and_states, token_stairs
from mini_engine.analysis import (
    BOOK_STEP,
    GiB,
    Ledger,
    MiB,
    Objective,
    blocks_needed,
    request_timeline,
    tokens_computed,
)
from mini_engine.config import SchedulerConfig
from mini_engine.simulator import Request, fixed_arrivals, simulate

matplotlib = pytest.importorskip("matplotlib")


def words(figure) -> str:
    return " | ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text())


def widths(axes, shade: str) -> list[float]:
    wanted = matplotlib.colors.to_rgba(shade)
    return [bar.get_width() for bar in axes.patches if bar.get_facecolor() == wanted]


def test_ledger_says_what_is_free_and_what_is_missing() -> None:
    fits = Ledger(32 * GiB, weights=15 * GiB, kv=12 * GiB)
    said = words(ledger_bars({"fits": fits, "over": replace(fits, kv=18 * GiB)}))
    assert "free\n5.0" in said and "of 32 GiB | " in said and "of 32 GiB, 1.0 too much" in said


def test_a_part_too_narrow_for_its_name_is_named_above() -> None:
    said = words(ledger_bars({"x": Ledger(32 * GiB, weights=15 * GiB, buffers=GiB // 8)})).split(" | ")
    assert "buffers" in said and "weights\n15.0" in said and "weights" not in said


@pytest.mark.parametrize("prompt, output, block", [(6, 4, 4), (5, 1, 8), (7, 2, 4)])
def test_tokens_in_kv_draws_all_but_the_last(prompt: int, output: int, block: int) -> None:
    said = words(tokens_in_kv(prompt, output, block))
    tokens = tokens_computed(prompt, output)
    assert f"{tokens} in KV, {blocks_needed(tokens, block)} blocks of {block}" in said
    assert f"p{prompt} " in f"{said} " and f"o{output} | drawn" in said and said.count(f"o{output} ") == 1


def test_against_pool_tells_what_is_too_much() -> None:
    said = words(against_pool({"a": 3 * MiB, "b": 4 * MiB, "c": 5 * MiB}, 4 * MiB))
    assert "3 MiB, fits" in said and "4 MiB, fits" in said and "5 MiB, too much" in said


def test_capacity_curve_marks_the_count_at_the_mark() -> None:
    said = words(capacity_curve([1, 10, 20], {"a": [9, 8, 7], "b": [0, 0, 0]}, mark=15))
    assert "| 8 |" in said and "a" in said


def test_life_lines_are_to_scale() -> None:
    request = request_timeline(0.5, 0.25, 0.1, 8, [0.0, 0.3])
    (axes,) = life_lines({"me": request}, deadline_s=2.0).axes
    assert [widths(axes, shade) for shade in (QUEUE, PREFILL, STALL)] == [
        pytest.approx([0.5]),
        pytest.approx([0.25]),
        pytest.approx([0.4]),
    ]
    assert "1.75 s" in words(axes.figure)


def test_token_stairs_name_ttft_and_longest_gap() -> None:
    said = words(token_stairs({"me": request_timeline(0.1, 0.2, 0.05, 4, [0.1])}, Objective(total_s=1)))
    assert "me: TTFT 300 ms, longest gap 150.0 ms, all 0.55 s" in said and "deadline 1 s" in said


def test_a_row_is_a_seat() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, num_blocks=20)
    run = simulate([Request("A", 0, 4, 4), Request("B", 0, 4, 1), Request("C", 0, 4, 2)], config, BOOK_STEP)
    rows, lanes = rows_and_states(run).axes
    seats = {(round(t.get_position()[0]), int(t.get_position()[1])): t.get_text()[0] for t in rows.texts}
    assert seats[0, 0] == seats[3, 0] == "A" and seats[0, 1] == "B" and seats[1, 1] == seats[2, 1] == "C"
    assert len(widths(lanes, QUEUE)) == 1, "C waits for one round"


def test_pool_over_time_counts_preemptions() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, block_size=4, num_blocks=12, enable_prefix_caching=False)
    run = simulate(fixed_arrivals(3, 0.0, 8, 16), config, BOOK_STEP)
    assert run.stats.num_preemptions > 0
    figure = pool_over_time({"mine": run})
    assert f"mine: at most 3 at a time, {run.stats.num_preemptions} preemptions" in words(figure)
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "v"]
    assert len(marks) == sum(round_.num_preempted > 0 for round_ in run.rounds)


def test_beside_aligns_figures() -> None:
    assert beside([("a", "1", "10"), ("bc", "22", "")]).splitlines() == [
        "    computed  book",
        "a          1    10",
        "bc        22",
    ]
