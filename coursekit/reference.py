"""What the hidden probes should print: computed by running the reference solution, never written down."""

from __future__ import annotations

from typing import Any

from coursekit.errors import ExerciseError
from coursekit.exercise import Exercise
from coursekit.runner import NotebookRun
from coursekit.score import Expected, describe, probe_values


def expected_of(exercise: Exercise, run: NotebookRun) -> Expected:
    """The values the probes printed in a run of rebuild.reference.

    Raises ExerciseError where the solution fails its own checks: nothing may be graded against a wrong solution.
    """
    problems = []
    values: dict[str, dict[str, Any]] = {}
    for item in exercise.items:
        outcome, message = describe(run.cells.get(item.grade_id), run.fate)
        if item.kind == "check" and outcome != "passed":
            problems.append(f"{item.grade_id} {outcome}: {message}")
    for probe in exercise.probes:
        cell = run.cells.get(probe.grade_id)
        printed = probe_values(cell)
        if cell is None or cell.status != "ok" or not printed:
            detail = f"{cell.ename}: {cell.evalue}" if cell and cell.status != "ok" else "it printed no values"
            problems.append(f"{probe.grade_id}: {detail}")
            continue
        wrong = [name for name, value in printed.items() if isinstance(value, dict) and set(value) == {"error"}]
        problems += [f"{probe.grade_id}: {name} raised {printed[name]['error']}" for name in wrong]
        unknown = [name for name in probe.tolerances if name not in printed]
        problems += [f"{probe.grade_id}: a tolerance is given for {name}, which it does not print" for name in unknown]
        values[probe.grade_id] = printed
    if problems:
        lines = "\n".join(f"{exercise.name}: {problem}" for problem in problems)
        raise ExerciseError(f"the reference solution does not pass its own checks:\n{lines}")
    return values
