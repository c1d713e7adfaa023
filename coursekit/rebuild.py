"""The notebook that is graded: our cells, the student's answers in them, the hidden probes last.

Whatever else a submission brought along (edited checks, tags, outputs, metadata) is not in it. The student's own code
cells are, where they wrote them: an answer may call a helper from there, as it did when they checked their work.
"""

from __future__ import annotations

import copy

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from coursekit.cells import KERNELSPEC
from coursekit.exercise import Exercise, kind_of
from coursekit.reading import START, Submission
from coursekit.release import strip_answer
from coursekit.worker import STUDENT

# Before any code of theirs, and again before the probes: what a probe prints must come out where they redirected it.
_FIRST = "import coursekit.checks"
_BEFORE_PROBES = "from coursekit.checks import restore_output\n\nrestore_output()"


def rebuild(exercise: Exercise, submission: Submission) -> NotebookNode:
    """Probes run after everything else: what code sees of hidden inputs, no visible cell can show any more."""
    cells = [new_code_cell(_FIRST, id="coursekit")]
    cells += [_student(source, f"extra-{START}{n}") for n, source in enumerate(submission.extras.get(START, []))]
    for cell in exercise.cells("setup", "answer", "check", "question"):
        name = cell.metadata["nbgrader"]["grade_id"]
        if kind_of(cell) == "answer":
            unsolved = strip_answer(cell.source, cell.metadata["textbook"]["part"])
            cells.append(_student(submission.answers.get(name, unsolved), name))
        elif kind_of(cell) != "question":
            cells.append(_ours(cell))
        cells += [_student(source, f"extra-{name}-{n}") for n, source in enumerate(submission.extras.get(name, []))]
    cells.append(new_code_cell(_BEFORE_PROBES, id="before-probes"))
    cells += [_ours(cell) for cell in exercise.cells("probe")]
    return new_notebook(cells=cells, metadata={"kernelspec": dict(KERNELSPEC)})


def reference(exercise: Exercise) -> NotebookNode:
    """The solution in the same order, to compute what the probes should print."""
    answers = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in exercise.cells("answer")}
    return rebuild(exercise, Submission(answers))


def _ours(cell: NotebookNode) -> NotebookNode:
    kept = copy.deepcopy(cell)
    kept.outputs, kept.execution_count = [], None
    return kept


def _student(source: str, name: str) -> NotebookNode:
    metadata = {"nbgrader": {"grade_id": name}, "textbook": {"kind": STUDENT}}
    return new_code_cell(source, id=name[:64], metadata=metadata)
