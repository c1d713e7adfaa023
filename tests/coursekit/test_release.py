"""Solutions become exercises without answers, with metadata nbgrader takes."""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from coursekit import bundle, cells
from coursekit.errors import CourseError, ExerciseError
from coursekit.exercise import Exercise, kind_of
from coursekit.release import out_of_step, release, release_notebook, strip_answer
from tests.coursekit import sample

# nbgrader's own schema of a cell's metadata, version 3 (nbgraderformat/v3.json), written as facts.
NBGRADER_V3 = {
    "type": "object",
    "required": ["schema_version", "grade", "locked", "solution"],
    "additionalProperties": False,
    "properties": {
        "schema_version": {"type": "integer", "minimum": 3, "maximum": 3},
        **{name: {"type": "boolean"} for name in ("grade", "locked", "solution", "task")},
        "grade_id": {"type": "string", "pattern": r"^[a-zA-Z0-9_\-]*$"},
        "points": {"type": "number", "minimum": 0},
        "checksum": {"type": "string", "minLength": 32, "maxLength": 32},
        "cell_type": {"enum": ["raw", "code", "markdown"]},
    },
}


def by_id(book: NotebookNode) -> dict[str, NotebookNode]:
    return {cell["id"]: cell for cell in book.cells}


def test_signature_and_docstring_stay(tmp_path: Path) -> None:
    source = by_id(release_notebook(sample.exercise(tmp_path)))["answer-a"].source
    assert source == (
        'def kv_gib(tokens, bytes_per_token):\n    """Gibibytes of `tokens` in the cache."""\n'
        '    raise NotImplementedError("part a: write your answer in place of this line")'
    )


def test_each_region_becomes_one_line() -> None:
    source = (
        "x = 1\n### BEGIN SOLUTION\ny = 2\n### END SOLUTION\nz = 3\n\t### BEGIN SOLUTION\n\tw = 4\n\t### END SOLUTION"
    )
    stub = 'raise NotImplementedError("part q: write your answer in place of this line")'
    assert strip_answer(source, "q") == f"x = 1\n{stub}\nz = 3\n\t{stub}"


def test_nothing_hidden_is_left(tmp_path: Path) -> None:
    book = sample.solution()
    by_id(book)["answer-a"].outputs = [new_output("stream", text="2 ** 30")]
    by_id(book)["answer-a"].execution_count = 3
    path = sample.write_solution(tmp_path, book)
    released = release_notebook(Exercise.load(path))
    text = cells.dumps(released)
    for secret in ("2**30\\n    ### END", "total = tokens", sample.HIDDEN, "probe", "lengths differ", "SOLUTION"):
        assert secret not in text
    assert all(not cell.outputs and cell.execution_count is None for cell in released.cells if cell.cell_type == "code")
    assert "YOUR ANSWER HERE" in by_id(released)["question-c"].source
    nbformat.validate(released)


def test_metadata_is_nbgraders(tmp_path: Path) -> None:
    exercise = sample.exercise(tmp_path)
    for book in (exercise.notebook, release_notebook(exercise)):
        found = [cell for cell in book.cells if "nbgrader" in cell.metadata]
        assert len(found) >= 6
        for cell in found:
            jsonschema.validate(dict(cell.metadata["nbgrader"]), NBGRADER_V3)
            flags = cell.metadata["nbgrader"]
            if cell.cell_type == "markdown":  # nbgrader: such a cell is graded and a solution, or neither
                assert flags["grade"] and flags["solution"]
            if flags["grade"]:
                assert "points" in flags


def test_checksum_is_nbgraders() -> None:
    """The value nbgrader 0.9.6's compute_checksum gives for this cell."""
    check = cells.check("a", 2, "assert True", "T")
    assert cells.checksum(check) == "e22903b86294a6541447a00accc76ab3"


def test_release_is_repeatable_and_says_what_changed(tmp_path: Path) -> None:
    sample.write_solution(tmp_path / "s")
    assert [path.name for path in release(tmp_path / "s", tmp_path / "e")] == ["ex_0_1.ipynb"]
    assert release(tmp_path / "s", tmp_path / "e") == []
    assert out_of_step(tmp_path / "s", tmp_path / "e") == []


def test_out_of_step(tmp_path: Path) -> None:
    sample.write_solution(tmp_path / "s")
    assert "not released yet" in out_of_step(tmp_path / "s", tmp_path / "e")[0]
    release(tmp_path / "s", tmp_path / "e")
    target = tmp_path / "e" / "ex_0_1.ipynb"
    target.write_text(target.read_text("utf-8").replace("Two functions", "2 functions"), "utf-8")
    (tmp_path / "e" / "ex_9_9.ipynb").write_text("{}", "utf-8")
    reasons = out_of_step(tmp_path / "s", tmp_path / "e")
    assert "2 functions" in reasons[0] and "ex_9_9: has no solution" in reasons[1]
    assert len(reasons) == 2


def flags(name: str, **changed: Any) -> Callable[[dict[str, NotebookNode]], None]:
    def change(found: dict[str, NotebookNode]) -> None:
        found[name].metadata["nbgrader"].update(changed)

    return change


def source(name: str, text: str) -> Callable[[dict[str, NotebookNode]], None]:
    def change(found: dict[str, NotebookNode]) -> None:
        found[name].source = text

    return change


@pytest.mark.parametrize(
    "change, problem",
    [
        (flags("check-a", grade_id="check b"), "grade_id must be"),
        (flags("check-a", grade_id="check-b"), "grade_id 'check-b' occurs 2 times"),
        (flags("check-a", points=-1), "points must be a number"),
        (flags("check-a", points=True), "points must be a number"),
        (flags("check-a", locked=False), "a check has grade, locked, solution = true, true, false"),
        (flags("setup", schema_version=2), "schema_version 3"),
        (source("answer-a", "def kv_gib(): pass"), "needs ### BEGIN SOLUTION"),
        (source("answer-a", "### END SOLUTION\n### BEGIN SOLUTION"), "in pairs"),
        (source("probe-a", "probe(a=1)"), "begins with ### BEGIN HIDDEN TESTS"),
        (source("check-a", "# NBVAL_SKIP\nexpect"), "nbval's markers"),
        (source("check-a", "if:"), "not plain Python"),
        (source("check-a", "for common in (1, 2):\n    total = common"), "the whole notebook common, total, where a"),
        (source("check-a", "from math import ceil\n\ndef wanted(): ..."), "the whole notebook ceil, wanted, where a"),
        (source("probe-a", "### BEGIN HIDDEN TESTS\nfew = 3\n### END HIDDEN TESTS"), "the whole notebook few, where a"),
        (lambda found: found["probe-b"].metadata["textbook"].update(part="a"), "a check with points needs a probe"),
        (lambda found: found["probe-b"].metadata["textbook"].update(part="z"), "part 'z', which has no check"),
        (lambda found: found["check-a"].metadata["textbook"].update(kind="cheque"), "kind 'cheque' is none of"),
    ],
)  # fmt: skip
def test_a_solution_that_cannot_work_is_refused(tmp_path: Path, change: Any, problem: str) -> None:
    book = sample.solution()
    change(by_id(book))
    with pytest.raises(ExerciseError, match="ex_0_1.ipynb") as caught:
        Exercise.load(sample.write_solution(tmp_path, book))
    assert problem in str(caught.value)


def test_what_a_check_keeps_to_itself_is_no_problem(tmp_path: Path) -> None:
    book = sample.solution()
    own = "def _check_a():\n    total = [ceil for ceil in (1, 2)]\n    from math import floor\n\n\n_few = 3\n_check_a()"
    by_id(book)["check-a"].source = f"from coursekit.checks import expect, expect_raises\n\n\n{own}"
    assert Exercise.load(sample.write_solution(tmp_path, book)).max_points > 0


def test_a_cell_id_twice_is_refused(tmp_path: Path) -> None:
    path = sample.write_solution(tmp_path)
    path.write_text(path.read_text("utf-8").replace('"id": "check-a"', '"id": "setup"'), "utf-8")
    with pytest.raises(ExerciseError, match="more than once: setup"):
        Exercise.load(path)


def test_a_solution_in_a_cell_without_a_role_is_refused(tmp_path: Path) -> None:
    book = sample.solution()
    book.cells.append(new_code_cell("### BEGIN SOLUTION\n1\n### END SOLUTION", id="loose"))
    with pytest.raises(ExerciseError, match="no answer cell"):
        Exercise.load(sample.write_solution(tmp_path, book))


def course(root: Path) -> Path:
    sample.write_solution(root / "solutions")
    release(root / "solutions", root / "exercises")
    for name, text in {
        "README.md": "hello", "tests/test_engine.py": "1", "tests/exercises/test_ex.py": "wrong answers",
        "tests/test_release.py": "path = 'solutions/ex_0_1.ipynb'", ".git/config": "x", "pkg/__pycache__/a.pyc": "x",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return root


def pack(root: Path) -> list[str]:
    return bundle.bundle(root, root / "solutions", root / "exercises", root / "student.zip")


def test_the_student_edition(tmp_path: Path) -> None:
    root = course(tmp_path)
    assert pack(root) == ["README.md", "exercises/ex_0_1.ipynb", "tests/test_engine.py"]
    first = (root / "student.zip").read_bytes()
    with zipfile.ZipFile(root / "student.zip") as archive:
        assert archive.namelist()[0] == "student/README.md"
        assert all(sample.HIDDEN.encode() not in archive.read(name) for name in archive.namelist())
    pack(root)
    assert (root / "student.zip").read_bytes() == first


def test_a_leak_is_refused(tmp_path: Path) -> None:
    root = course(tmp_path)
    (root / "notes.md").write_text(sample.PROBE_BLOCKS, "utf-8")
    with pytest.raises(CourseError, match="notes.md contains probe-b of ex_0_1"):
        pack(root)
    assert not (root / "student.zip").exists()


def test_a_bundle_out_of_step_is_refused(tmp_path: Path) -> None:
    root = course(tmp_path)
    book = sample.solution()
    book.cells[0].source = "# Changed"
    sample.write_solution(root / "solutions", book)
    with pytest.raises(CourseError, match="out of step"):
        pack(root)


def test_release_leaves_the_solution_alone(tmp_path: Path) -> None:
    exercise = sample.exercise(tmp_path)
    before = copy.deepcopy(exercise.notebook)
    release_notebook(exercise)
    assert exercise.notebook == before
    assert [kind_of(cell) for cell in before.cells].count("probe") == 2
