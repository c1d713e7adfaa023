"""`course check`: a student's own check of their copy, under nbval in lax mode."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from tqdm import tqdm

from coursekit.cells import checksum
from coursekit.errors import CourseError
from coursekit.exercise import kind_of
from coursekit.kernel import Limits
from coursekit.reading import read_cells
from coursekit.release import ANSWER_HERE, by_name
from coursekit.runner import Job, NotebookRun, run_notebooks
from coursekit.score import answer_failure, describe

_SIGNS = {"passed": "✓", "unsolved": "·", "open": "?"}
_MAX_BYTES = 200_000_000
_FRESH = "take a fresh copy and paste your answers into it"


@dataclass(frozen=True)
class Part:
    """outcome as in score.ItemResult; an open question is "open", with a message while it has no answer.

    part: its letter in the notebook.
    """

    title: str
    points: float
    max_points: float
    outcome: str
    message: str = ""
    read: str = ""
    part: str = ""


@dataclass(frozen=True)
class Checked:
    """One exercise. problems: about the notebook itself, such as a check cell that was edited or lost."""

    exercise: str
    title: str
    parts: list[Part]
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems and all(part.outcome in ("passed", "open") for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        parts = [vars(part) for part in self.parts]
        return {
            "exercise": self.exercise,
            "title": self.title,
            "passed": self.passed,
            "problems": self.problems,
            "parts": parts,
        }


def find(names: Sequence[str], exercises: Path) -> list[Path]:
    """Paths of the named exercises (a name or a file), or of all in the directory. Raises CourseError."""
    there = sorted(exercises.glob("*.ipynb"))
    if not names and not there:
        raise CourseError(f"no exercises in {exercises}: run this in the course's directory, or name a notebook")
    paths = []
    for name in names:
        found = next((path for path in (Path(name), exercises / name) if path.is_file()), None)
        found = found or by_name(name, {path.stem: path for path in there})
        if found is None:
            raise CourseError(f"no exercise {name!r}; there are {', '.join(path.stem for path in there) or 'none'}")
        paths.append(found)
    return paths or there


def check(paths: Sequence[Path], limits: Limits, workers: int = 1, progress: bool = True) -> list[Checked]:
    """Run each notebook as it is, in its own directory. Raises CourseError for a file that is no exercise."""
    books = {str(path): _read(path) for path in paths}
    jobs = [Job(str(path), books[str(path)], path.resolve().parent) for path in paths]
    runs = run_notebooks(jobs, limits, workers)
    bar = tqdm(runs, total=len(jobs), desc="checking", unit="notebook", disable=None if progress else True)
    done = {run.key: run for run in bar}
    return [_checked(books[str(path)], done[str(path)]) for path in paths]


def _read(path: Path) -> nbformat.NotebookNode:
    try:
        read_cells(path, _MAX_BYTES)  # for its reasons, which are made for students
        book = nbformat.read(path, as_version=4)
    except Exception as error:
        raise CourseError(f"{path.name} {error}") from None
    if not isinstance(book.metadata.get("textbook"), dict) or "items" not in book.metadata["textbook"]:
        raise CourseError(f"{path.name} is not an exercise of this course (its notebook metadata says nothing of one)")
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return book


def _checked(book: nbformat.NotebookNode, run: NotebookRun) -> Checked:
    textbook = book.metadata["textbook"]
    cells = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in book.cells if "nbgrader" in cell.metadata}
    problems = []
    edited = set()
    for grade_id, cell in cells.items():
        known = cell.metadata["nbgrader"].get("checksum")
        if known and known != checksum(cell):
            edited.add(grade_id)
            problems.append(f"the locked cell {grade_id} was edited; grading uses the original")
        if kind_of(cell) == "setup" and grade_id in run.cells and run.cells[grade_id].status != "ok":
            problems.append(f"the set-up cell {grade_id} fails: {describe(run.cells[grade_id], run.fate)[1]}")
    parts = []
    for item in textbook["items"]:
        outcome, message = _outcome(item, cells, edited, run)
        points = item["points"] if outcome == "passed" else 0.0
        about = (item["title"], points, item["points"], outcome, message)
        parts.append(Part(*about, item.get("read", ""), item.get("part", "")))
    return Checked(textbook["exercise"], textbook.get("title", ""), parts, problems)


def _outcome(
    item: Mapping[str, Any], cells: Mapping[str, nbformat.NotebookNode], edited: Collection[str], run: NotebookRun
) -> tuple[str, str]:
    cell = cells.get(item["grade_id"])
    if item["kind"] == "question":
        written = cell.source.replace(ANSWER_HERE, "").strip() if cell else ""
        return "open", "" if written else "not answered yet" if cell else "its cell is no longer in the notebook"
    if cell is None:
        return "died", f"its check cell is no longer in the notebook; {_FRESH}"
    if cell.metadata["nbgrader"]["grade_id"] in edited:
        return "died", f"its check cell was edited, so what it says does not count; {_FRESH}"
    outcome, message = describe(run.cells.get(item["grade_id"]), run.fate)
    if outcome == "passed":
        return outcome, message
    answers = [name for name, cell in cells.items() if _answers(cell, item.get("part"))]
    if not answers:
        return "died", f"its answer cell is no longer in the notebook; {_FRESH}"
    return outcome, answer_failure(item.get("part", ""), answers, run.cells) or message


def _answers(cell: nbformat.NotebookNode, part: str | None) -> bool:
    return kind_of(cell) == "answer" and cell.metadata["textbook"].get("part") == part


def report(checked: Checked) -> str:
    """The summary a student reads in a terminal or below a notebook cell."""
    titles = [f"{part.part}  {part.title}".strip() for part in checked.parts]
    width = max([len(title) for title in titles] + [20])
    lines = [f"{checked.exercise}: {checked.title}"]
    lines += [f"  ! {problem}" for problem in checked.problems]
    for part, title in zip(checked.parts, titles, strict=True):
        sign = _SIGNS.get(part.outcome, "✗")
        gained = f"{part.points:g} of {part.max_points:g}"
        if part.outcome == "open":
            sign = "·" if part.message else sign
            gained = f"{_points(part.max_points)}, read by your instructor"
            gained += f"; {part.message}" if part.message else ""
        lines.append(f"  {sign} {title:<{width}}  {gained}")
        if part.outcome not in ("passed", "open"):
            lines += [f"      {line}" for line in part.message.splitlines()]
            lines += [f"      Read next: {part.read}"] if part.read else []
    graded = [part for part in checked.parts if part.outcome != "open"]
    passed = sum(part.outcome == "passed" for part in graded)
    points, most = sum(part.points for part in graded), sum(part.max_points for part in graded)
    lines.append(f"  {passed} of {len(graded)} parts pass, {points:g} of {_points(most)}.")
    if checked.passed:
        lines.append("  Grading tries your functions on further inputs as well.")
    return "\n".join(lines)


def _points(number: float) -> str:
    return f"{number:g} point{'s' * (number != 1)}"
