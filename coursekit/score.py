"""From what ran to points and reasons: points need the check to pass and every probe value of its part to be right."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coursekit.checks import PROBE_PREFIX
from coursekit.compare import difference
from coursekit.exercise import Exercise, Item, Probe
from coursekit.runner import CellRun, NotebookRun

_SAYINGS = {
    "timeout": "this cell took longer than the time limit for one cell{after} (an endless loop?)",
    "stuck": "this cell took longer than the time limit for one cell{after}, and could not be interrupted",
    "overtime": "the notebook as a whole took longer than its time limit",
    "died": "the kernel died while this cell ran (out of memory, or ended by the code itself)",
    "flood": "this cell printed far too much",
    "crashed": "the grader itself failed on this notebook",
    "not_run": "this cell was not reached: the kernel had ended before",
    "skipped": "this cell was skipped",
}
_MAX_MESSAGE = 2000


@dataclass(frozen=True)
class ItemResult:
    """One item of one submission. outcome: passed, failed, unsolved, error, timeout, died, hidden, open.

    points: None for an open question that waits for an instructor. right, of: values of the hidden probes.
    """

    grade_id: str
    kind: str
    part: str
    title: str
    max_points: float
    points: float | None
    outcome: str
    message: str = ""
    right: int = 0
    of: int = 0
    read: str = ""


# What the reference solution's probes printed: {grade_id of the probe: {name: value}}.
Expected = Mapping[str, Mapping[str, Any]]


def score(exercise: Exercise, run: NotebookRun, expected: Expected) -> list[ItemResult]:
    results = []
    for item in exercise.items:
        if item.kind == "question":
            results.append(_result(item, None, "open"))
            continue
        probes = [probe for probe in exercise.probes if probe.part == item.part]
        answers = [
            cell.metadata["nbgrader"]["grade_id"]
            for cell in exercise.cells("answer")
            if cell.metadata["textbook"].get("part") == item.part
        ]
        results.append(_check(item, answers, probes, run, expected))
    return results


def probe_values(cell: CellRun | None) -> dict[str, Any] | None:
    """The last line the probe printed, as values; None where it printed none that can be read."""
    lines = [line for line in (cell.text if cell else "").splitlines() if line.startswith(PROBE_PREFIX)]
    try:
        values = json.loads(lines[-1].removeprefix(PROBE_PREFIX)) if lines else None
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _check(item: Item, answers: list[str], probes: list[Probe], run: NotebookRun, expected: Expected) -> ItemResult:
    outcome, message = describe(run.cells.get(item.grade_id), run.fate)
    if outcome != "passed":
        message = answer_failure(item.part, answers, run.cells) or message
    right = of = 0
    reasons = []
    for probe in probes:
        wanted = expected[probe.grade_id]
        cell = run.cells.get(probe.grade_id)
        got = probe_values(cell) or {}
        wrong = {name for name in wanted if _differs(probe, name, got.get(name), wanted[name])}
        right, of = right + len(wanted) - len(wrong), of + len(wanted)
        reasons.append(_hidden_reason(cell, got, wrong))
    if outcome == "passed" and right < of:
        outcome = "hidden"
        reason = next((reason for reason in reasons if reason), "")
        message = (
            f"The visible check passes, but of {of} values on inputs you have not seen {right} are right. {reason}"
        )
    points = item.points if outcome == "passed" else 0.0
    return _result(item, points, outcome, message.strip(), right, of)


def describe(cell: CellRun | None, fate: str | None) -> tuple[str, str]:
    """(outcome, sentence) of a visible cell."""
    if cell is None:
        return "died", _saying(fate or "not_run")
    if cell.status == "ok":
        return "passed", ""
    if cell.status != "error":
        outcome = "timeout" if cell.status in ("timeout", "stuck", "overtime") else "died"
        return outcome, _saying(cell.status, cell.seconds)
    if cell.ename == "NotImplementedError" or cell.evalue.startswith("Not solved yet"):
        return "unsolved", cell.evalue[:_MAX_MESSAGE] or "Not solved yet."
    if cell.ename in ("CheckFailed", "AssertionError"):
        return "failed", cell.evalue[:_MAX_MESSAGE] or "The check failed."
    return "error", f"{cell.ename}: {cell.evalue}".removeprefix("Silenced: ")[:_MAX_MESSAGE]


def answer_failure(part: str, answers: Iterable[str], cells: Mapping[str, CellRun]) -> str:
    """What is said of a part whose answer cell itself raises, a syntax error say: what its check says follows from it.

    "" where none does. IPython's name for the cell (3011438952.py) tells a student nothing, and goes.
    """
    for name in answers:
        cell = cells.get(name)
        if cell is not None and cell.status == "error" and cell.ename != "NotImplementedError":
            reason = re.sub(r"\((?:<.*>|\S+\.py), line (\d+)\)$", r"(line \1 of the cell)", cell.evalue[:_MAX_MESSAGE])
            return (
                f"The answer cell of part {part} itself fails with {cell.ename}: {reason}. "
                "Mend the cell, then run it again."
            )
    return ""


def _saying(status: str, seconds: float = 0.0) -> str:
    return _SAYINGS.get(status, _SAYINGS["not_run"]).format(after=f", {seconds:.0f} s" if seconds >= 1 else "")


def _differs(probe: Probe, name: str, got: Any, wanted: Any) -> bool:
    rel_tol, abs_tol = probe.tolerance(name)
    return difference(got, wanted, rel_tol, abs_tol) is not None


def _hidden_reason(cell: CellRun | None, got: dict[str, Any], wrong: set[str]) -> str:
    """Why, without a word the student's code could have chosen: its messages may carry the hidden inputs."""
    if not wrong:
        return ""
    if cell is not None and cell.status not in ("ok", "error"):
        return f"There, {_saying(cell.status, cell.seconds)}."
    errors = [got[name]["error"] for name in sorted(wrong) if isinstance(got.get(name), dict) and "error" in got[name]]
    name = str(errors[0] if errors else cell.ename if cell else "")
    known = getattr(builtins, name, None) if name.isidentifier() else None
    if isinstance(known, type) and issubclass(known, Exception):
        return f"There, your code raises {name}."
    return "" if got else "There, your code ends before it gives a value."


def _result(
    item: Item, points: float | None, outcome: str, message: str = "", right: int = 0, of: int = 0
) -> ItemResult:
    about = (item.grade_id, item.kind, item.part, item.title, item.points)
    return ItemResult(*about, points, outcome, message, right, of, item.read)
