"""What became of one submission, as it is kept on disk between runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coursekit.release import write_atomically
from coursekit.score import ItemResult

VERSION = 1  # of the grading: raise it when the same submission would get other points


@dataclass(frozen=True)
class Result:
    """status: graded, missing, refused (cannot be read as an answer to this exercise) or crashed (the grader's fault).

    answers: what the student wrote to the open questions. fingerprint: of submission, exercise and grading, so that
    a later run knows whether this still holds. seconds: wall-clock time of the notebook.
    """

    student: str
    exercise: str
    status: str
    reason: str = ""
    problems: list[str] = field(default_factory=list)
    items: list[ItemResult] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    file: str = ""
    canvas_id: str = ""
    fingerprint: str = ""
    seconds: float = 0.0

    def with_manual(self, points: dict[str, float]) -> Result:
        """With an instructor's points for the open questions, by grade_id; what was not graded has none to give."""
        if self.status != "graded":
            return self
        items = [
            dataclasses.replace(
                item, points=points.get(item.grade_id), outcome="graded" if item.grade_id in points else "open"
            )
            if item.kind == "question"
            else item
            for item in self.items
        ]
        return dataclasses.replace(self, items=items)

    @property
    def points(self) -> float:
        return sum(item.points or 0.0 for item in self.items)

    @property
    def max_points(self) -> float:
        return sum(item.max_points for item in self.items)

    @property
    def waiting(self) -> int:
        """Open questions without points yet."""
        return sum(item.points is None for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        totals = {"points": self.points, "max_points": self.max_points, "waiting": self.waiting}
        return {"version": VERSION, **totals, **dataclasses.asdict(self)}

    def save(self, out: Path) -> None:
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(path_of(out / "results", self.student, self.exercise, ".json"), text + "\n")


def load(out: Path, student: str, exercise: str) -> Result | None:
    """The kept result, or None where there is none that this version can read."""
    try:
        values = json.loads(path_of(out / "results", student, exercise, ".json").read_text("utf-8"))
        if values["version"] != VERSION:
            return None
        items = [ItemResult(**item) for item in values["items"]]
        names = {field.name for field in dataclasses.fields(Result)}
        return Result(**{name: value for name, value in values.items() if name in names} | {"items": items})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def path_of(directory: Path, student: str, exercise: str, suffix: str) -> Path:
    return directory / exercise / (slug(student) + suffix)


def slug(name: str) -> str:
    """A student's name as a file name: the same for the same name, another for another one, on any file system."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:60]
    if safe and safe == name == name.lower():
        return safe
    return f"{safe or 'student'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
