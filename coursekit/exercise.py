"""A solution notebook, read and validated: its parts, points and probes."""

from __future__ import annotations

import ast
import hashlib
import re
import symtable
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from coursekit.cells import BEGIN_HIDDEN, BEGIN_SOLUTION, END_HIDDEN, END_SOLUTION
from coursekit.errors import ExerciseError

_GRADE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KNOWN = {"expect", "expect_raises", "probe"}  # coursekit.checks's own, which README names to authors
_FLAGS = {  # kind: (cell type, grade, locked, solution)
    "setup": ("code", False, True, False),
    "answer": ("code", False, False, True),
    "check": ("code", True, True, False),
    "probe": ("code", True, True, False),
    "question": ("markdown", True, False, True),
}


@dataclass(frozen=True)
class Item:
    """What gives points: a check (given by the machine) or an open question (given by an instructor)."""

    grade_id: str
    kind: str
    part: str
    points: float
    title: str
    read: str = ""


@dataclass(frozen=True)
class Probe:
    """A hidden cell and how far its values may be off. rel_tol and abs_tol as in math.isclose."""

    grade_id: str
    part: str
    rel_tol: float
    abs_tol: float
    tolerances: Mapping[str, Mapping[str, float]]

    def tolerance(self, name: str) -> tuple[float, float]:
        own = self.tolerances.get(name, {})
        return own.get("rel", self.rel_tol), own.get("abs", self.abs_tol)


@dataclass(frozen=True)
class Exercise:
    name: str
    title: str
    path: Path
    notebook: NotebookNode
    items: tuple[Item, ...]
    probes: tuple[Probe, ...]
    digest: str

    @property
    def max_points(self) -> float:
        return sum(item.points for item in self.items)

    def cells(self, *kinds: str) -> list[NotebookNode]:
        return [cell for cell in self.notebook.cells if kind_of(cell) in kinds]

    @classmethod
    def load(cls, path: Path) -> Exercise:
        """Read a solution notebook. Raises ExerciseError with every problem found in it."""
        try:
            raw = path.read_bytes()
            book = nbformat.v4.reads(raw.decode("utf-8"))
            ids = Counter(cell.get("id", "") for cell in book.cells)
            twice = [name for name, count in ids.items() if count > 1]
            if twice:  # nbformat would give one of them another id, another one each time
                raise ValueError(f"cell ids that occur more than once: {', '.join(twice)}")
            nbformat.validate(book)
        except Exception as error:
            raise ExerciseError(f"{path.name} cannot be read as a notebook: {error}") from None
        problems = list(_problems(book, path.stem))
        if problems:
            raise ExerciseError("\n".join(f"{path.name}: {problem}" for problem in problems))
        textbook = book.metadata["textbook"]
        items = tuple(_item(cell) for cell in book.cells if kind_of(cell) in ("check", "question"))
        probes = tuple(_probe(cell) for cell in book.cells if kind_of(cell) == "probe")
        digest = hashlib.sha256(raw).hexdigest()
        return cls(textbook["exercise"], textbook["title"], path, book, items, probes, digest)


def kind_of(cell: Mapping[str, Any]) -> str:
    """setup, answer, check, probe, question, or "" for a cell without a role."""
    textbook = cell.get("metadata", {}).get("textbook", {})
    return str(textbook.get("kind", "")) if isinstance(textbook, dict) else ""


def _item(cell: NotebookNode) -> Item:
    flags, textbook = cell.metadata["nbgrader"], cell.metadata["textbook"]
    read = textbook.get("read", "")
    return Item(flags["grade_id"], textbook["kind"], textbook["part"], flags["points"], textbook["title"], read)


def _probe(cell: NotebookNode) -> Probe:
    textbook = cell.metadata["textbook"]
    tolerances = textbook.get("tolerances", {})
    rel, absolute = textbook.get("rel_tol", 1e-9), textbook.get("abs_tol", 0.0)
    return Probe(cell.metadata["nbgrader"]["grade_id"], textbook["part"], rel, absolute, tolerances)


def _problems(book: NotebookNode, stem: str) -> Iterator[str]:
    if (book.nbformat, book.nbformat_minor) < (4, 5):
        yield f"is notebook format {book.nbformat}.{book.nbformat_minor}; save it as 4.5 (cells have ids there)"
    if book.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "metadata.kernelspec.name must be python3"
    textbook = book.metadata.get("textbook", {})
    if textbook.get("exercise") != stem:
        yield f"metadata.textbook.exercise is {textbook.get('exercise')!r}, the file is {stem!r}: make them equal"
    if not textbook.get("title"):
        yield "metadata.textbook.title is missing"
    for name, count in Counter(_grade_ids(book)).items():
        if count > 1:
            yield f"grade_id {name!r} occurs {count} times"
    for index, cell in enumerate(book.cells):
        name = cell.metadata.get("nbgrader", {}).get("grade_id") or cell.get("id") or f"number {index}"
        for problem in _cell_problems(cell):
            yield f"cell {name}: {problem}"
    yield from _part_problems(book)


def _cell_problems(cell: NotebookNode) -> Iterator[str]:
    kind, flags = kind_of(cell), cell.metadata.get("nbgrader")
    if not kind:
        if flags is not None:
            yield "has nbgrader metadata but no metadata.textbook.kind"
        elif cell.cell_type == "code" and BEGIN_SOLUTION in cell.source:
            yield f"has {BEGIN_SOLUTION} but is no answer cell; it would be handed out as it is"
        return
    if kind not in _FLAGS:
        yield f"kind {kind!r} is none of {', '.join(_FLAGS)}"
        return
    cell_type, *wanted = _FLAGS[kind]
    if cell.cell_type != cell_type:
        yield f"a {kind} is a {cell_type} cell"
    if not isinstance(flags, dict) or flags.get("schema_version") != 3 or flags.get("task") is not False:
        yield "metadata.nbgrader must hold schema_version 3 and task false"
        return
    if not _GRADE_ID.fullmatch(str(flags.get("grade_id", ""))):
        yield "grade_id must be 1 to 64 of A-Z a-z 0-9 _ -"
    if [flags.get(name) for name in ("grade", "locked", "solution")] != wanted:
        yield f"a {kind} has grade, locked, solution = {', '.join(map(str, wanted)).lower()}"
    points = flags.get("points")
    if flags.get("grade") and (
        isinstance(points, bool) or not isinstance(points, (int, float)) or not 0 <= points < 1e6
    ):
        yield f"points must be a number of at least 0, not {points!r}"
    if kind != "setup" and not cell.metadata["textbook"].get("part"):
        yield "metadata.textbook.part is missing"
    if kind in ("check", "question") and not cell.metadata["textbook"].get("title"):
        yield "metadata.textbook.title is missing"
    yield from _source_problems(kind, cell)


def _source_problems(kind: str, cell: NotebookNode) -> Iterator[str]:
    lines = [line.strip() for line in cell.source.splitlines()]
    if kind in ("answer", "question"):
        marks = [line for line in lines if line in (BEGIN_SOLUTION, END_SOLUTION)]
        if not marks or marks != [BEGIN_SOLUTION, END_SOLUTION] * (len(marks) // 2):
            yield f"needs {BEGIN_SOLUTION} and {END_SOLUTION} in pairs, each on a line of its own"
    if kind == "probe" and (lines[:1], lines[-1:]) != ([BEGIN_HIDDEN], [END_HIDDEN]):
        yield f"a probe begins with {BEGIN_HIDDEN} and ends with {END_HIDDEN}"
    if kind in ("check", "probe", "setup"):
        if "NBVAL_" in cell.source or cell.metadata.get("tags"):
            yield "nbval's markers and tags have no place in a graded notebook"
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield f"is not plain Python, line {error.lineno}: {error.msg}"
            return
    names = _bound(cell.source) if kind in ("check", "probe") else []
    if names:
        yield (
            f"gives the whole notebook {', '.join(names)}, where a helper of a student may have that name: "
            "put the code into a function, or let the name begin with _"
        )


def _bound(source: str) -> list[str]:
    """Names that a cell gives to the notebook, but for those that begin with _ and the known ones."""
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    names = (symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported())
    return sorted(name for name in names if not name.startswith("_") and name not in _KNOWN)


def _part_problems(book: NotebookNode) -> Iterator[str]:
    parts = {
        kind: [cell.metadata["textbook"].get("part") for cell in book.cells if kind_of(cell) == kind] for kind in _FLAGS
    }
    for part in parts["probe"]:
        if part not in parts["check"]:
            yield f"a probe belongs to part {part!r}, which has no check"
    for cell in book.cells:
        flags = cell.metadata.get("nbgrader", {})
        if (
            kind_of(cell) == "check"
            and flags.get("points")
            and cell.metadata["textbook"].get("part") not in parts["probe"]
        ):
            yield f"cell {flags.get('grade_id')}: a check with points needs a probe (code beside it can fake a check)"


def _grade_ids(book: NotebookNode) -> list[str]:
    return [cell.metadata["nbgrader"].get("grade_id", "") for cell in book.cells if cell.metadata.get("nbgrader")]
