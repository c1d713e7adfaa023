"""Every figure of the book's sections 8.1 to 8.3, computed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.analysis import book_figures
from tests.analysis.book_figures import FIGURES
from tests.analysis.book_figures_8_3 import FIGURES_8_3

HERE = Path(__file__).parent
BOOK: list[dict[str, Any]] = [
    figure
    for name in ("figures_8_1_8_2.toml", "figures_8_3.toml")
    for figure in tomllib.loads((HERE / name).read_text(encoding="utf-8"))["figure"]
]
COMPUTED = {**FIGURES, **FIGURES_8_3}


@pytest.mark.parametrize("figure", BOOK, ids=[figure["id"] for figure in BOOK])
def test_the_books_figure_is_computed(figure: dict[str, Any]) -> None:
    assert figure["id"] in COMPUTED, f"nothing computes {figure['id']}: {figure['what']}"
    assert COMPUTED[figure["id"]]() == pytest.approx(figure["value"], rel=figure["rel_tol"], abs=0)


def test_every_computation_belongs_to_one_figure() -> None:
    assert sorted([*FIGURES, *FIGURES_8_3]) == sorted(figure["id"] for figure in BOOK)


@pytest.mark.parametrize(
    "schedule, total_ms, longest_gap_ms",
    [("fixed", 870.5, 26.3), ("continuous", 765.6, 376.0), ("chunked", 844.3, 132.6)],
)
def test_schedules_to_a_tenth_of_a_millisecond(schedule: str, total_ms: float, longest_gap_ms: float) -> None:
    priced = getattr(book_figures, schedule)()
    assert priced.total_s * 1e3 == pytest.approx(total_ms, abs=0.05)
    assert priced.longest_gap_s * 1e3 == pytest.approx(longest_gap_ms, abs=0.05)
