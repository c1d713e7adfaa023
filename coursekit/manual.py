"""Points an instructor gives to open questions: OUT/manual.csv, filled in by hand and kept by every later run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coursekit.errors import CourseError
from coursekit.result import Result
from coursekit.tables import number, read_table, write_table

HEADER = ("student", "exercise", "question", "points", "of", "comment", "answer", "answer_id", "note")
_MAX_ANSWER = 4000
Key = tuple[str, str, str]  # student, exercise, grade_id


@dataclass(frozen=True)
class Manual:
    """One row. points: as the instructor wrote it, "" while open. answer_id: which answer the points were given to."""

    points: str = ""
    comment: str = ""
    of: str = ""
    answer: str = ""
    answer_id: str = ""
    note: str = ""


def load_manual(path: Path) -> dict[Key, Manual]:
    """Raises CourseError, naming the line, for points that are no number of 0 … `of`: nothing is lost in silence."""
    rows: dict[Key, Manual] = {}
    if not path.exists():
        return rows
    for line, row in enumerate(read_table(path, HEADER[:4]), start=2):
        points = row["points"].strip().replace(",", ".")
        most = row.get("of", "").strip().replace(",", ".")
        if points and not 0 <= _float(points) <= (_float(most) if most else math.inf):
            raise CourseError(
                f"{path.name}, row {line} ({row['student']}, {row['question']}): points {row['points']!r} must be a "
                f"number from 0 to {most or 'the maximum'}, or empty"
            )
        rest = {name: row.get(name, "") for name in ("comment", "of", "answer", "answer_id", "note")}
        rows[row["student"], row["exercise"], row["question"]] = Manual(points, **rest)
    return rows


def merge(kept: dict[Key, Manual], results: Iterable[Result]) -> dict[Key, Manual]:
    """A row for every open question; what an instructor wrote stays, with a note where the answer has changed since."""
    rows = dict(kept)
    for result in results:
        for item in result.items:
            if item.kind != "question" or result.status != "graded":
                continue
            key = (result.student, result.exercise, item.grade_id)
            answer = result.answers.get(item.grade_id, "")
            answer_id = hashlib.sha256(answer.encode()).hexdigest()[:12]
            old = rows.get(key, Manual())
            changed = bool(old.points) and old.answer_id not in ("", answer_id)
            note = "the answer has changed since the points were given" if changed else old.note
            given_to = old.answer_id if changed else answer_id
            rows[key] = Manual(old.points, old.comment, number(item.max_points), answer[:_MAX_ANSWER], given_to, note)
    return rows


def save_manual(path: Path, rows: dict[Key, Manual]) -> None:
    table = [
        (*key, row.points and float(row.points), row.of, row.comment, row.answer, row.answer_id, row.note)
        for key, row in sorted(rows.items())
    ]
    write_table(path, HEADER, table)


def points_of(rows: dict[Key, Manual], student: str, exercise: str) -> dict[str, float]:
    return {
        grade_id: float(row.points)
        for (name, other, grade_id), row in rows.items()
        if (name, other) == (student, exercise) and row.points
    }


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value
