"""For the class: the gradebook in the columns Canvas imports, and how each item went."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coursekit.exercise import Exercise
from coursekit.release import write_atomically
from coursekit.result import Result
from coursekit.tables import cell, read_table, write_table

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
Roster = dict[str, dict[str, str]]  # student's key in the submissions → Canvas's columns
_POINTS_POSSIBLE = "Points Possible"


def read_roster(path: Path) -> list[dict[str, str]]:
    """The rows of a class list or gradebook exported from Canvas. Raises CourseError without a Student column."""
    rows = read_table(path, CANVAS[:1])
    people = [{name: cell(row, name) for name in CANVAS} for row in rows]
    return [person for person in people if person["Student"] and person["Student"] != _POINTS_POSSIBLE]


def match(people: Sequence[dict[str, str]], students: dict[str, str]) -> tuple[Roster, list[dict[str, str]], list[str]]:
    """(roster by student, people without a submission, students who are not on the list).

    students: key → Canvas id ("" where unknown). Matched by Canvas id, login, SIS id, then by name.
    """
    index: dict[str, list[int]] = {}
    for row, person in enumerate(people):
        for name in ("ID", "SIS Login ID", "SIS User ID", "Student"):
            if person[name]:
                index.setdefault(person[name].casefold(), []).append(row)
    roster: Roster = {}
    used: set[int] = set()
    for student, canvas_id in students.items():
        rows = index.get(canvas_id.casefold()) or index.get(student.casefold()) or []
        if len(set(rows)) == 1:  # two people of one name are left for an instructor to tell apart
            roster[student] = people[rows[0]]
            used.add(rows[0])
    absent = [person for row, person in enumerate(people) if row not in used]
    return roster, absent, [student for student in students if student not in roster]


def write_gradebook(path: Path, exercises: Sequence[Exercise], results: Sequence[Result], roster: Roster) -> None:
    """One row a student, one column an exercise. Open questions count once an instructor has given their points."""
    table: dict[str, dict[str, float]] = {}
    ids: dict[str, str] = {}
    for result in results:
        table.setdefault(result.student, {})[result.exercise] = result.points
        ids[result.student] = result.canvas_id
    header = [*CANVAS, *(exercise.title for exercise in exercises)]
    rows: list[list[str | float | None]] = [
        [_POINTS_POSSIBLE, "", "", "", "", *(exercise.max_points for exercise in exercises)]
    ]
    people = {student: roster.get(student, {"Student": student, "ID": ids[student]}) for student in table}
    for student, person in sorted(people.items(), key=lambda pair: (pair[1]["Student"].casefold(), pair[0])):
        points = table[student]
        rows.append(
            [*(person.get(name, "") for name in CANVAS), *(points.get(exercise.name) for exercise in exercises)]
        )
    write_table(path, header, rows)


def item_statistics(results: Sequence[Result]) -> list[dict[str, Any]]:
    """How each item went among the submissions that were graded.

    discrimination: correlation of the item's points with those of all other items, None where either never varies; near
    0 or below, the item does not tell who knows the matter, and the check itself deserves a look.
    """
    graded = [result for result in results if result.status == "graded"]
    table = []
    keys = list(dict.fromkeys((result.exercise, item.grade_id) for result in graded for item in result.items))
    for exercise, grade_id in keys:
        pairs = [
            (result, item)
            for result in graded
            if result.exercise == exercise
            for item in result.items
            if item.grade_id == grade_id
        ]
        scored = [(result, item, item.points) for result, item in pairs if item.points is not None]
        mine = [points for _, _, points in scored]
        rest = [result.points - points for result, _, points in scored]
        messages = Counter(item.message for _, item in pairs if item.message)
        table.append({
            "exercise": exercise, "item": grade_id, "title": pairs[0][1].title, "max_points": pairs[0][1].max_points,
            "submissions": len(pairs), "mean_points": round(statistics.fmean(mine), 4) if mine else None,
            "full_points": sum(points == item.max_points for _, item, points in scored),
            "outcomes": dict(sorted(Counter(item.outcome for _, item in pairs).items())),
            "discrimination": _correlation(mine, rest),
            "commonest_messages": [{"count": count, "message": text} for text, count in messages.most_common(3)],
        })  # fmt: skip
    return table


def write_items(out: Path, results: Sequence[Result]) -> None:
    table = item_statistics(results)
    write_atomically(out / "items.json", json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    columns = ("exercise", "item", "title", "max_points", "submissions", "mean_points", "full_points", "discrimination")
    rows = []
    for row in table:
        outcomes = ", ".join(f"{name} {count}" for name, count in row["outcomes"].items())
        commonest = row["commonest_messages"][:1]
        times, message = (commonest[0]["count"], commonest[0]["message"]) if commonest else (None, "")
        rows.append([*(row[name] for name in columns), outcomes, times, message])
    write_table(out / "items.csv", [*columns, "outcomes", "times", "commonest_message"], rows)


def _correlation(mine: Sequence[float], rest: Sequence[float]) -> float | None:
    if len(mine) < 3 or len(set(mine)) == 1 or len(set(rest)) == 1:
        return None
    return round(statistics.correlation(mine, rest), 3)
