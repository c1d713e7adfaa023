"""From a solution to the exercise a student opens, and whether the two are in step."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from nbformat import NotebookNode

from coursekit.cells import BEGIN_SOLUTION, END_SOLUTION, KERNELSPEC, checksum, dumps
from coursekit.errors import CourseError
from coursekit.exercise import Exercise, kind_of

_REGION = re.compile(
    rf"^([ \t]*){re.escape(BEGIN_SOLUTION)}[ \t]*\n.*?^[ \t]*{re.escape(END_SOLUTION)}[ \t]*$", re.M | re.S
)
ANSWER_HERE = "YOUR ANSWER HERE"


def strip_answer(source: str, part: str) -> str:
    """The answer cell without its answer: signature and docstring stay, each solution region becomes one `raise`."""
    return _REGION.sub(rf'\1raise NotImplementedError("part {part}: write your answer in place of this line")', source)


def release_notebook(exercise: Exercise) -> NotebookNode:
    """The student's notebook: no answers, no probes, no outputs; metadata valid for nbgrader.

    Its metadata lists the items, so that `course check` can tell when a check cell was lost, and carries nbgrader's
    checksum of each locked cell, so that it can tell when one was edited.
    """
    released = copy.deepcopy(exercise.notebook)
    released.cells = [_released(cell) for cell in released.cells if kind_of(cell) != "probe"]
    items = [vars(item) for item in exercise.items]
    kept = {key: value for key, value in released.metadata["textbook"].items() if key != "author"}
    released.metadata = NotebookNode(
        kernelspec=dict(KERNELSPEC), language_info={"name": "python"}, textbook={**kept, "items": items}
    )
    return released


def _released(cell: NotebookNode) -> NotebookNode:
    kind = kind_of(cell)
    if kind == "answer":
        cell.source = strip_answer(cell.source, cell.metadata["textbook"]["part"])
    elif kind == "question":
        cell.source = _REGION.sub(ANSWER_HERE, cell.source)
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
    cell.metadata = NotebookNode({key: cell.metadata[key] for key in ("nbgrader", "textbook") if key in cell.metadata})
    if kind in ("setup", "check"):
        cell.metadata["nbgrader"]["checksum"] = checksum(cell)
    return cell


def find_exercises(solutions: Path, names: list[str] | None = None) -> list[Exercise]:
    """All solution notebooks, or the named. Raises CourseError where there is none, ExerciseError for a bad one."""
    found = {path.stem: path for path in sorted(solutions.glob("*.ipynb"))}
    if not found:
        raise CourseError(f"no solution notebook (*.ipynb) in {solutions}; name the directory with --solutions")
    chosen = {name: by_name(name, found) for name in names or found}
    unknown = [name for name, path in chosen.items() if path is None]
    if unknown:
        raise CourseError(f"no solution named {', '.join(unknown)}; there are {', '.join(found)}")
    return [Exercise.load(path) for path in chosen.values() if path is not None]


def by_name(name: str, there: Mapping[str, Path]) -> Path | None:
    """The notebook of that name, or the only one whose name begins with it: ex_8_1 for ex_8_1_reads_and_capacity."""
    begins = [path for stem, path in there.items() if stem.startswith(f"{name}_")]
    return there.get(name) or (begins[0] if len(begins) == 1 else None)


def release(solutions: Path, exercises: Path, names: list[str] | None = None) -> list[Path]:
    """Write the exercises and return the paths of those that changed."""
    changed = []
    exercises.mkdir(parents=True, exist_ok=True)
    for exercise in find_exercises(solutions, names):
        target = exercises / exercise.path.name
        text = dumps(release_notebook(exercise))
        if not target.exists() or target.read_text("utf-8") != text:
            write_atomically(target, text)
            changed.append(target)
    return changed


def out_of_step(solutions: Path, exercises: Path, names: list[str] | None = None) -> list[str]:
    """One line for each exercise that is not what its solution would be released as; empty when all are in step."""
    reasons = []
    found = find_exercises(solutions, names)
    for exercise in found:
        target = exercises / exercise.path.name
        if not target.exists():
            reasons.append(f"{exercise.name}: not released yet")
            continue
        wanted, there = dumps(release_notebook(exercise)), target.read_text("utf-8")
        if wanted != there:
            lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), lineterm="", n=0)
            first = next((line for line in list(lines)[2:] if line[:1] in "+-"), "")
            reasons.append(f"{exercise.name}: differs from its solution, first at {first.strip()[:100]!r}")
    if not names:
        known = {exercise.path.name for exercise in found}
        extra = [path for path in sorted(exercises.glob("*.ipynb")) if path.name not in known]
        reasons += [f"{path.stem}: has no solution" for path in extra]
    return reasons


def write_atomically(path: Path, text: str) -> None:
    """A file is there whole or not at all, whatever interrupts the writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    partial.write_text(text, "utf-8", newline="")
    os.replace(partial, path)
