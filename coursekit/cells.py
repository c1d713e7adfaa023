"""The kinds of cells an exercise is made of, with nbgrader's metadata (schema 3) and ours under `metadata.textbook`.

An author may build a solution notebook from these functions or write the same metadata by hand; README.md shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

BEGIN_SOLUTION, END_SOLUTION = "### BEGIN SOLUTION", "### END SOLUTION"
BEGIN_HIDDEN, END_HIDDEN = "### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"
KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}


def notebook(exercise: str, title: str, cells: Sequence[NotebookNode], **textbook: Any) -> NotebookNode:
    """A solution notebook. exercise: its name, as in the file's (ex_8_1); title: what students read."""
    metadata = {
        "kernelspec": dict(KERNELSPEC),
        "language_info": {"name": "python"},
        "textbook": {"exercise": exercise, "title": title, **textbook},
    }
    return new_notebook(cells=list(cells), metadata=metadata)


def text(source: str, id: str) -> NotebookNode:
    """Markdown a student reads; hints go in <details>."""
    return new_markdown_cell(source, id=id)


def hint(part: str, source: str, summary: str = "Hint") -> NotebookNode:
    return text(f"<details><summary>{summary}</summary>\n\n{source}\n\n</details>", f"hint-{part}")


def setup(source: str, id: str = "setup") -> NotebookNode:
    """A locked cell that gives no points: imports and given values."""
    return _code(source, id, {"kind": "setup"}, locked=True)


def answer(part: str, source: str) -> NotebookNode:
    """Where the student writes; what lies between the solution marks is removed on release."""
    return _code(source, f"answer-{part}", {"kind": "answer", "part": part}, solution=True)


def check(part: str, points: float, source: str, title: str, read: str = "") -> NotebookNode:
    """A locked check. read: what to read next when it fails ("chapter 02, The roofline; book 8.2.1")."""
    textbook = {"kind": "check", "part": part, "title": title, "read": read}
    return _code(source, f"check-{part}", textbook, grade=True, locked=True, points=points)


def probe(
    part: str,
    source: str,
    *,
    rel_tol: float = 1e-9,
    abs_tol: float = 0.0,
    tolerances: Mapping[str, Mapping[str, float]] | None = None,
    id: str = "",
) -> NotebookNode:
    """A hidden cell that calls coursekit.checks.probe; a part's points need every value of its probes right.

    tolerances: per value's name, {"rel": …, "abs": …}. The marks make nbgrader hide the cell's content as well.
    """
    textbook = {"kind": "probe", "part": part, "rel_tol": rel_tol, "abs_tol": abs_tol}
    if tolerances:
        textbook["tolerances"] = {name: dict(pair) for name, pair in tolerances.items()}
    body = f"{BEGIN_HIDDEN}\n{source.strip()}\n{END_HIDDEN}"
    return _code(body, id or f"probe-{part}", textbook, grade=True, locked=True, points=0)


def question(part: str, points: float, source: str, model_answer: str, title: str) -> list[NotebookNode]:
    """An open question with points an instructor gives: its text, and the cell to answer in."""
    textbook = {"kind": "question", "part": part, "title": title}
    metadata = _metadata(f"question-{part}", textbook, grade=True, solution=True, points=points)
    body = f"{BEGIN_SOLUTION}\n{model_answer.strip()}\n{END_SOLUTION}"
    return [text(source, f"ask-{part}"), new_markdown_cell(body, id=f"question-{part}", metadata=metadata)]


def checksum(cell: NotebookNode) -> str:
    """nbgrader's checksum of a cell (md5 over source, type, flags, id, points): tells whether it was edited."""
    flags = cell.metadata["nbgrader"]
    parts = [cell.source, cell.cell_type, *(str(flags[name]) for name in ("grade", "solution", "locked", "grade_id"))]
    if flags["grade"]:
        parts.append(str(float(flags["points"])))
    return hashlib.md5("".join(parts).encode(), usedforsecurity=False).hexdigest()


def dumps(book: NotebookNode) -> str:
    """The notebook as the one text we store: 4.5, sorted keys, one trailing newline."""
    book.nbformat, book.nbformat_minor = 4, 5
    return nbformat.writes(book, version=4, indent=1).rstrip("\n") + "\n"


def _code(source: str, id: str, textbook: dict[str, Any], **flags: Any) -> NotebookNode:
    return new_code_cell(source.strip("\n"), id=id, metadata=_metadata(id, textbook, **flags))


def _metadata(
    grade_id: str,
    textbook: dict[str, Any],
    *,
    grade: bool = False,
    locked: bool = False,
    solution: bool = False,
    points: float | None = None,
) -> dict[str, Any]:
    nbgrader = {"schema_version": 3, "grade_id": grade_id, "grade": grade, "locked": locked, "solution": solution}
    nbgrader["task"] = False
    if points is not None:
        nbgrader["points"] = points
    return {"nbgrader": nbgrader, "textbook": textbook}
