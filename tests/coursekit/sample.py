"""A tiny exercise to release, check and grade: two graded parts, one of them with a tolerance, and an open question."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from nbformat import NotebookNode

from coursekit import cells
from coursekit.exercise import Exercise
from coursekit.release import release_notebook

NAME = "ex_0_1"

GIB = '''def kv_gib(tokens, bytes_per_token):
    """Gibibytes of `tokens` in the cache."""
    ### BEGIN SOLUTION
    total = tokens * bytes_per_token
    return total / 2**30
    ### END SOLUTION
'''
BLOCKS = '''def blocks(tokens, block_size):
    """Blocks that hold `tokens`."""
    ### BEGIN SOLUTION
    return -(-tokens // block_size)
    ### END SOLUTION
'''
CHECK_GIB = """from coursekit.checks import expect

expect("kv_gib(8192, 147456)", lambda: kv_gib(8192, 147456), 1.125,
       mistakes={"GB instead of GiB": 1.207959552}, hint="1 GiB is 2**30 bytes.")
"""
CHECK_BLOCKS = """from coursekit.checks import expect

expect("blocks(97, 16)", lambda: blocks(97, 16), 7, mistakes={"blocks not rounded up": 6})
"""
PROBE_GIB = """from coursekit.checks import probe

probe(small=lambda: kv_gib(31337, 4242), large=lambda: kv_gib(10**9, 73728))
"""
PROBE_BLOCKS = """from coursekit.checks import probe

probe(full=lambda: blocks(4096, 64), rest=lambda: blocks(4099, 64), none=lambda: blocks(0, 64))
"""
# A number of the hidden inputs: wherever it shows up, a hidden input has leaked.
HIDDEN = "31337"


def solution() -> NotebookNode:
    return cells.notebook(
        NAME,
        "Ex 0-1: warming up",
        [
            cells.text("# Warming up\n\nTwo functions.", "intro"),
            cells.setup("import math"),
            cells.answer("a", GIB),
            cells.check("a", 2, CHECK_GIB, "KV in GiB", read="chapter 01; book 8.1.2"),
            cells.hint("a", "Divide by 2**30."),
            cells.probe("a", PROBE_GIB, rel_tol=1e-3),
            cells.answer("b", BLOCKS),
            cells.check("b", 3, CHECK_BLOCKS, "Blocks"),
            cells.probe("b", PROBE_BLOCKS),
            *cells.question("c", 4, "Why blocks at all?", "Because lengths differ.", "Why blocks"),
        ],
    )


def write_solution(directory: Path, book: NotebookNode | None = None, name: str = NAME) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.ipynb"
    path.write_text(cells.dumps(book or solution()), "utf-8")
    return path


def exercise(directory: Path) -> Exercise:
    return Exercise.load(write_solution(directory))


RIGHT = {
    "answer-a": "def kv_gib(tokens, bytes_per_token):\n    return tokens * bytes_per_token / 2**30",
    "answer-b": "def blocks(tokens, block_size):\n    return math.ceil(tokens / block_size)",
    "question-c": "So that no memory lies idle.",
}


def submission(directory: Path, **answers: str) -> NotebookNode:
    """The released notebook, filled in: RIGHT, with answer_a=…, answer_b=… or question_c=… in place."""
    book = copy.deepcopy(release_notebook(exercise(directory)))
    sources = RIGHT | {name.replace("_", "-"): source for name, source in answers.items()}
    for cell in book.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id in sources:
            cell.source = sources[grade_id]
    return book


def as_json(book: NotebookNode) -> str:
    return json.dumps(book)
