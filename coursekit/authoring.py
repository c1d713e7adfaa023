"""For tests of exercises: what do the checks and probes say to right, missing and wrong answers?

runs = try_answers(path, {
    "unsolved": UNSOLVED,
    "solved": {},
    "GB for GiB": {"answer-a": "def kv_gib(n):\\n    return n / 1e9"},
})
assert failures(runs["solved"]) == {}
assert "GB" in failures(runs["GB for GiB"])["check-a"]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coursekit.exercise import Exercise
from coursekit.kernel import Limits
from coursekit.reading import Submission
from coursekit.rebuild import rebuild, reference
from coursekit.reference import expected_of
from coursekit.release import strip_answer
from coursekit.runner import Job, run_notebooks
from coursekit.score import ItemResult, score

_REFERENCE = "reference solution"
UNSOLVED: Mapping[str, str] = {"*": "unsolved"}


def try_answers(
    solution: Path, variants: Mapping[str, Mapping[str, str]], limits: Limits | None = None, workers: int = 2
) -> dict[str, dict[str, ItemResult]]:
    """Grade variants of the reference solution: {variant: {grade_id of the check: its result}}.

    variants: name → {grade_id of an answer cell: its source}; cells that are not named keep the reference answer.
    UNSOLVED is the exercise as it is handed out. Raises ExerciseError where the solution fails its own checks, and
    KeyError for a grade_id that is no answer cell.
    """
    exercise = Exercise.load(solution)
    jobs = [Job(_REFERENCE, reference(exercise))]
    jobs += [
        Job(name, rebuild(exercise, Submission(_answers(exercise, variant)))) for name, variant in variants.items()
    ]
    runs = {run.key: run for run in run_notebooks(jobs, limits or Limits(), workers)}
    expected = expected_of(exercise, runs.pop(_REFERENCE))
    return {
        name: {item.grade_id: item for item in score(exercise, runs[name], expected) if item.kind == "check"}
        for name in variants
    }


def failures(results: Mapping[str, ItemResult]) -> dict[str, str]:
    """{grade_id: message} of the checks that gave no points."""
    return {grade_id: item.message for grade_id, item in results.items() if item.outcome != "passed"}


def _answers(exercise: Exercise, variant: Mapping[str, str]) -> dict[str, str]:
    cells = {cell.metadata["nbgrader"]["grade_id"]: cell for cell in exercise.cells("answer")}
    if variant is UNSOLVED:
        return {name: strip_answer(cell.source, cell.metadata["textbook"]["part"]) for name, cell in cells.items()}
    unknown = set(variant) - set(cells)
    if unknown:
        raise KeyError(f"no answer cell {', '.join(sorted(unknown))}; there are {', '.join(cells)}")
    return {name: variant.get(name, cell.source) for name, cell in cells.items()}
