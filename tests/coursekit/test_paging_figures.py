"""What the pictures of chapter 04 say in words and bars agrees with the figures they are made of."""

from __future__ import annotations

import pytest

from coursekit.figures.paging import Area, allocation, blocks, stretches, through_the_table, waste_and_entries
from coursekit.figures.sharing import block_contents, branch_trees, reference_counts, release_line
from coursekit.figures.show import PALETTE, PAPER
from mini_engine.analysis import paged_slots, reserved_slots, shared_slots, unused_slots

matplotlib = pytest.importorskip("matplotlib")

LENGTHS = {"A": 9, "B": 13, "C": 5, "D": 15}


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def widths(axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches]


def bars(axes, **wanted) -> list:
    """Bars whose face, hatch or height is the wanted one."""
    face = matplotlib.colors.to_rgba(wanted["face"]) if "face" in wanted else None
    found = [bar for bar in axes.patches if face is None or bar.get_facecolor() == face]
    return [bar for bar in found if "hatch" not in wanted or bar.get_hatch() == wanted["hatch"]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_areas_hold_what_the_arithmetic_counts(size: int) -> None:
    lengths = list(LENGTHS.values())
    reserved, paged = stretches(LENGTHS, 16), blocks(LENGTHS, size)
    shared = blocks(LENGTHS, size, sharers="AB", prefix=8)
    assert sum(area.size for area in reserved) == reserved_slots(lengths, 16)
    assert sum(area.size for area in paged) == paged_slots(lengths, size)
    assert sum(area.size for area in shared) == shared_slots(lengths, size, sharers=2, prefix=8)
    assert sum(area.size - area.used for area in paged) == unused_slots(lengths, size)
    assert sum(area.owner == "A B" for area in shared) == 8 // size


def test_an_empty_slot_is_hatched_and_a_shared_block_named() -> None:
    figure = allocation({"paged": blocks(LENGTHS, 4), "shared": blocks(LENGTHS, 4, "AB", 8), "gap": [Area("", 0, 3)]})
    paged, shared, gap = figure.axes
    assert len(bars(paged, hatch="////")) == len(bars(shared, hatch="////")) == 10
    assert words(shared).count("A+B") == 2 and words(paged).count("A") == 3
    assert sorted(words(gap)) == ["free", "gap"]


def test_waste_and_entries_name_the_marked_size() -> None:
    figure = waste_and_entries([2, 4, 8], [4, 10, 14], [23, 13, 7], [4, 12, 28], mark=4)
    assert {"unused slots: 10 at block size 4", "table entries: 13 at block size 4", "10", "13"} <= set(words(figure))


@pytest.mark.parametrize("position, block, slot", [(3, 2, 11), (5, 0, 1), (8, 3, 12)])
def test_the_table_is_followed(position: int, block: int, slot: int) -> None:
    said = words(through_the_table([2, 0, 3], size=4, length=9, position=position, num_blocks=5))
    assert any(f"physical block {block}, slot {slot}" in text for text in said)
    assert said.count(f"{position}") == 2, "in reading order, and in memory"
    assert "9" not in said, "beyond the length there is nothing"


def test_a_count_that_falls_to_zero_is_free() -> None:
    figure = reference_counts({"start": {1: 2, 2: 0}, "one ends": {1: 1, 2: 0}, "both": {1: 0, 2: 0}})
    said = [text.get_text() for text in figure.axes[0].texts]
    assert said.count("free") == 4 and said.count("2") == said.count("1") == 1
    framed = [bar for bar in figure.axes[0].patches if bar.get_linewidth() > 1]
    assert len(framed) == 1, "block 1 came free in the last line; block 2 was free all along"


def test_contents_show_who_wrote() -> None:
    figure = block_contents({"before": {"block 1: A, B": ["t0"]}, "after": {"block 1: B": ["t0", "B1"]}}, size=2)
    before, after = figure.axes
    assert {"t0", "block 1: A, B", "before"} == set(words(before)) and {"t0", "B1", "block 1: B"} <= set(words(after))
    assert len(bars(after, face=PALETTE[1])) == 1, "B has the second colour, as in every other figure"
    assert len(bars(before, face=PAPER)) == 1 and len({bar.get_facecolor() for bar in after.patches}) == 2


def test_trees_are_to_scale() -> None:
    figure = branch_trees({"cache": (4, 95, 9), "none": (4, 0, 104)})
    cache, none = figure.axes
    assert sorted(widths(cache)) == [9, 9, 9, 9, 95]
    assert widths(none) == [104] * 4
    assert "95 blocks, there once" in words(cache) and words(cache).count("+ 9") == 4 and words(none).count("104") == 4


def test_release_line_says_both_moments() -> None:
    figure = release_line(1.55, 31.41, (35, 139), what="the record")
    said = words(figure)
    assert {"abort returns: 1.55 ms", "139: 104 more at 31.4 ms", "35", "the record"} <= set(said)
    assert sorted(widths(figure.axes[0])) == [1.55, 31.41]
