"""What a failed part is told to read exists: the named chapter has sections of exactly these headings."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from coursekit.exercise import Exercise

ROOT = Path(__file__).resolve().parents[2]


def headings(number: str) -> list[str]:
    [path] = (ROOT / "chapters").glob(f"{number}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.findall(r"^#+ (.+?) *$", text, flags=re.M)


NAMES = [
    "ex_8_0_life_of_a_request",
    "ex_8_1_reads_and_capacity",
    "ex_8_2_chunk_from_gap",
    "ex_8_3_block_manager",
    "ex_8_4_prefix_value",
    "ex_10_1_cut_the_context",
]


@pytest.mark.parametrize("name", ["ex_8_4_prefix_value", "ex_10_1_cut_the_context"])
def test_a_part_is_called_in_the_check_as_in_the_notebook(name: str) -> None:
    exercise = Exercise.load(ROOT / "solutions" / f"{name}.ipynb")
    text = "\n".join(cell.source for cell in exercise.notebook.cells if cell.cell_type == "markdown")
    found = re.findall(r"^## Part (\w) · (.+?)(?: \(\d+ points, read by your instructor\))?$", text, flags=re.M)
    assert found == [(item.part, item.title) for item in exercise.items]


@pytest.mark.parametrize("name", NAMES)
def test_every_check_names_a_section_that_exists(name: str) -> None:
    checks = [item for item in Exercise.load(ROOT / "solutions" / f"{name}.ipynb").items if item.kind == "check"]
    for item in checks:
        [number] = re.findall(r"chapter (\d\d)", item.read)
        named = re.findall(r'"(.+?)"', item.read)
        missing = [words for words in named if words not in headings(number)]
        assert named and not missing, f"part {item.part}: {item.read}"
