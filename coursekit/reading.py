"""A student's notebook, read with tolerance: only the sources of their cells matter, and which answer they belong to.

Nothing else of the file is trusted: no outputs, no tags, no metadata but the ids.
"""

from __future__ import annotations

import json
import stat
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from coursekit.errors import SubmissionError
from coursekit.exercise import Exercise

START = ""


@dataclass(frozen=True)
class Submission:
    """answers: grade_id → source. extras: the student's own code cells by the graded cell they come after.
    problems: sentences for the student, about what was found odd but did not stop the grading."""

    answers: dict[str, str]
    extras: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_cells(path: Path, max_bytes: int) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """(cells, the notebook's metadata, problems). Raises SubmissionError with a reason a student understands."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            raise SubmissionError("is a link or a special file, not a notebook")
        if about.st_size > max_bytes:
            size = f"{about.st_size / 1e6:.0f} MB; the limit is {max_bytes / 1e6:.0f} MB"
            raise SubmissionError(f"is {size}. Clear the outputs (Kernel > Restart and Clear Outputs) and submit again")
        raw = path.read_bytes()
    except OSError as error:
        raise SubmissionError(f"cannot be read: {error.strerror}") from None
    if not raw.strip():
        raise SubmissionError("is empty")
    try:
        book = json.loads(raw)
    except RecursionError:
        raise SubmissionError("is nested too deep to be a notebook") from None
    except (ValueError, UnicodeError) as error:
        cut = raw.lstrip()[:1] == b"{" and not raw.rstrip().endswith(b"}")
        kind = "stops in the middle, as if the upload was cut short" if cut else "is not a notebook (no JSON)"
        raise SubmissionError(f"{kind}: {str(error)[:100]}") from None
    problems = []
    if isinstance(book, dict) and "worksheets" in book:
        problems.append("the notebook is in the old format 3; it was converted")
        try:
            book = nbformat.reads(json.dumps(book), as_version=4)
        except Exception as error:
            raise SubmissionError(
                f"is in an old notebook format that cannot be converted: {str(error)[:100]}"
            ) from None
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise SubmissionError("is JSON, but not a notebook: it has no list of cells")
    metadata = book.get("metadata")
    cells = [cell for cell in book["cells"] if isinstance(cell, dict)]
    return cells, metadata if isinstance(metadata, dict) else {}, problems


def read_submission(path: Path, exercise: Exercise, max_bytes: int) -> Submission:
    """Match the student's sources with the exercise's answers. Raises SubmissionError where nothing matches."""
    cells, metadata, problems = read_cells(path, max_bytes)
    answers = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in exercise.cells("answer", "question")}
    known = {cell.metadata["nbgrader"]["grade_id"] for cell in exercise.cells("setup", "answer", "check", "question")}
    found: dict[str, list[str]] = defaultdict(list)
    extras: dict[str, list[str]] = defaultdict(list)
    anchor = START
    for cell in cells:
        name, source = grade_id(cell), source_of(cell)
        if name in answers:
            found[name].append(source)
            if cell.get("cell_type") != answers[name].cell_type:
                problems.append(
                    f"the answer cell {name} was changed to {cell.get('cell_type')!r}; its text was taken anyway"
                )
        if name in known:
            anchor = name
        elif cell.get("cell_type") == "code" and source.strip():
            extras[anchor].append(source)
    if not found:
        theirs = named_exercise(metadata)
        if theirs and theirs != exercise.name:
            raise SubmissionError(f"is an answer to {theirs}, not to {exercise.name}")
        raise SubmissionError(
            f"has none of the answer cells of {exercise.name}: fill in the notebook that was handed out"
        )
    missing = [name for name in answers if name not in found]
    if missing:
        problems.append(f"answer cells are missing: {', '.join(missing)}")
    chosen = {}
    for name, sources in found.items():
        different = list(dict.fromkeys(sources))
        if len(different) > 1:
            problems.append(
                f"the answer cell {name} is there {len(sources)} times; the last one that was filled in counts"
            )
            different = [source for source in different if "raise NotImplementedError(" not in source] or different
        chosen[name] = different[-1]
    return Submission(chosen, dict(extras), problems)


def grade_id(cell: dict[str, Any]) -> str:
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return str(nbgrader.get("grade_id", "")) if isinstance(nbgrader, dict) else ""


def source_of(cell: dict[str, Any]) -> str:
    """The cell's text; lone surrogates, which no file could hold, become question marks."""
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(line for line in source if isinstance(line, str))
    return source.encode("utf-8", "replace").decode() if isinstance(source, str) else ""


def named_exercise(metadata: dict[str, Any]) -> str:
    textbook = metadata.get("textbook")
    return str(textbook.get("exercise", "")) if isinstance(textbook, dict) else ""
