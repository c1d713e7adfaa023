"""A class graded, interrupted, graded again: what is kept, what is counted, what an instructor finds."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coursekit import grade as grading
from coursekit import gradebook
from coursekit.errors import CourseError, ExerciseError
from coursekit.exercise import Exercise
from coursekit.grade import Options, Summary, grade
from coursekit.manual import load_manual
from coursekit.result import Result, load, slug
from coursekit.score import ItemResult
from coursekit.tables import escape, read_table, unescape, write_table
from tests.coursekit import sample

ROSTER = """Student,ID,SIS User ID,SIS Login ID,Section
    Points Possible,,,,
"Ames, Alice",11,s11,alice,A
"Boll, Bob",12,s12,bob,A
"Carr, Carol",13,s13,carol,B
"""


def put(root: Path, student: str, **answers: str) -> None:
    place = root / "in" / student
    place.mkdir(parents=True, exist_ok=True)
    (place / "ex_0_1.ipynb").write_text(sample.as_json(sample.submission(root / "solutions", **answers)), "utf-8")


def run(root: Path, **options: object) -> Summary:
    exercise = Exercise.load(root / "solutions" / "ex_0_1.ipynb")
    return grade(root / "in", [exercise], root / "out", Options(jobs=2, progress=False, **options))  # type: ignore[arg-type]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graded once: alice right, bob wrong in part a, dora not on the list, carol on the list without a submission."""
    root = tmp_path_factory.mktemp("course")
    (root / "roster.csv").write_text(ROSTER, "utf-8")
    put(root, "alice")
    put(root, "bob", answer_a="def kv_gib(t, b):\n    return t * b / 1e9")
    put(root, "dora", answer_b="def blocks(t, b):\n    raise NotImplementedError('later')", question_c="=HYPERLINK()")
    run(root, roster=root / "roster.csv")
    return root


def test_gradebook_has_canvas_columns(course: Path) -> None:
    assert rows(course / "out" / "gradebook.csv") == [
        dict(zip(("Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Ex 0-1: warming up"), row, strict=True))
        for row in (
            ("Points Possible", "", "", "", "", "9"),
            ("Ames, Alice", "11", "s11", "alice", "A", "5"),
            ("Boll, Bob", "12", "s12", "bob", "A", "3"),
            ("Carr, Carol", "13", "s13", "carol", "B", "0"),
            ("dora", "", "", "", "", "2"),
        )
    ]


def test_results_say_why(course: Path) -> None:
    bob = load(course / "out", "bob", "ex_0_1")
    assert bob and "GB instead of GiB" in bob.items[0].message and (bob.items[0].right, bob.items[0].of) == (0, 2)
    carol = load(course / "out", "Carr, Carol", "ex_0_1")
    assert carol and (carol.status, carol.reason, carol.points) == ("missing", "nothing was submitted", 0)
    dora = load(course / "out", "dora", "ex_0_1")
    assert dora and dora.items[1].outcome == "unsolved"
    page = (course / "out" / "feedback" / "ex_0_1" / "bob.html").read_text("utf-8")
    assert "GB instead of GiB" in page and "chapter 01; book 8.1.2" in page and "3 of 9 points" in page


def test_item_statistics(course: Path) -> None:
    first, second, third = json.loads((course / "out" / "items.json").read_text("utf-8"))
    assert (first["submissions"], first["full_points"], first["mean_points"]) == (3, 2, pytest.approx(4 / 3, abs=1e-4))
    assert first["outcomes"] == {"failed": 1, "passed": 2}
    assert first["commonest_messages"][0]["count"] == 1 and "GiB" in first["commonest_messages"][0]["message"]
    assert second["outcomes"] == {"passed": 2, "unsolved": 1} and third["outcomes"] == {"open": 3}
    assert len(rows(course / "out" / "items.csv")) == 3


def test_what_is_graded_is_kept_and_manual_points_count(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run runs no notebook; what an instructor wrote is in the gradebook, the page, and still in the table."""
    monkeypatch.setattr(grading, "run_notebooks", lambda jobs, *_: pytest.fail("ran again") if list(jobs) else iter(()))
    table = course / "out" / "manual.csv"
    assert [row["question"] for row in rows(table)] == ["question-c"] * 3
    text = table.read_text("utf-8-sig")
    assert "'=HYPERLINK()" in text
    filled = text.replace("alice,ex_0_1,question-c,,4,,", 'alice,ex_0_1,question-c,"3,5",4,Well <said>,')
    table.write_text(filled, "utf-8")
    summary = run(course, roster=course / "roster.csv")
    assert summary.kept == 3 and sum(result.waiting for result in summary.results) == 2
    assert rows(course / "out" / "gradebook.csv")[1]["Ex 0-1: warming up"] == "8.5"
    assert "Well &lt;said&gt;" in (course / "out" / "feedback" / "ex_0_1" / "alice.html").read_text("utf-8")
    run(course, roster=course / "roster.csv")
    assert next(row for row in rows(table) if row["student"] == "alice")["points"] == "3.5"


def test_regrade_keeps_manual_points_and_notes_a_changed_answer(course: Path) -> None:
    table = course / "out" / "manual.csv"
    before = [row for row in rows(table) if row["student"] == "alice"]
    put(course, "alice", question_c="Something else.")
    summary = run(course, roster=course / "roster.csv", regrade=True)
    (alice,) = (row for row in rows(table) if row["student"] == "alice")
    assert summary.kept == 0
    assert (alice["points"], alice["comment"]) == (before[0]["points"], before[0]["comment"])
    assert (
        alice["note"] == "the answer has changed since the points were given" and alice["answer"] == "Something else."
    )


@pytest.mark.parametrize("points", ["5", "-1", "much", "nan"])
def test_points_that_cannot_be_are_refused_by_line(tmp_path: Path, points: str) -> None:
    write_table(
        tmp_path / "manual.csv", ("student", "exercise", "question", "points", "of"), [("a", "e", "q", points, "4")]
    )
    with pytest.raises(CourseError, match=r"manual.csv, row 2 \(a, q\)"):
        load_manual(tmp_path / "manual.csv")


def test_a_mended_check_grades_again(tmp_path: Path) -> None:
    put(tmp_path, "alice", answer_b="def blocks(t, b):\n    return t // b + 1")
    assert run(tmp_path).results[0].items[1].outcome == "hidden"
    book = sample.solution()
    (probe,) = (cell for cell in book.cells if cell["id"] == "probe-b")
    probe.source = probe.source.replace("full=lambda: blocks(4096, 64), ", "").replace(
        ", none=lambda: blocks(0, 64)", ""
    )
    sample.write_solution(tmp_path / "solutions", book)
    summary = run(tmp_path)
    assert summary.kept == 0 and summary.results[0].items[1].outcome == "passed"


def test_nothing_is_graded_against_a_wrong_solution(tmp_path: Path) -> None:
    put(tmp_path, "alice")
    book = sample.solution()
    (answer,) = (cell for cell in book.cells if cell["id"] == "answer-b")
    answer.source = answer.source.replace("-(-tokens // block_size)", "0")
    sample.write_solution(tmp_path / "solutions", book)
    with pytest.raises(ExerciseError, match="blocks.*should be 7"):
        run(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path, root: Path) -> None:
    """Ctrl-C in the middle: exit code 130, no process left behind, and what was done is not done again."""
    put(tmp_path, "a")
    put(tmp_path, "b", answer_a="import time\ntime.sleep(63.5)")
    put(tmp_path, "c")
    command = [
        sys.executable,
        "-m",
        "coursekit.cli",
        "grade",
        "in",
        "--out",
        "out",
        "--jobs",
        "1",
        "--cell-timeout",
        "90",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 90
    while not load(tmp_path / "out", "a", "ex_0_1") and time.monotonic() < until:
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"goes on from there" in errors
    assert children and not [child for child in psutil.wait_procs(children, timeout=10)[1]]
    put(tmp_path, "b")
    summary = run(tmp_path)
    assert summary.kept == 1 and [result.points for result in summary.results] == [5, 5, 5]


def test_a_worker_that_breaks_costs_one_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that jupyter's own reader chokes on must at worst cost the notebook it came from."""
    put(tmp_path, "a")
    put(tmp_path, "b", answer_a="import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    put(tmp_path, "c")
    results = {result.student: result for result in run(tmp_path).results}
    assert results["b"].status == "crashed" and results["b"].points == 0
    assert results["a"].points == results["c"].points == 5
    assert load(tmp_path / "out", "b", "ex_0_1") is not None
    put(tmp_path, "b")
    assert [result.points for result in run(tmp_path).results] == [5, 5, 5]  # a crash is never kept


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "'=1", "'", "\tx", "plain", "O'Neil", ""])
def test_csv_escaping_is_undone_by_reading(tmp_path: Path, text: str) -> None:
    assert escape(text)[:1] not in ("=", "+", "-", "@", "\t") and unescape(escape(text)) == text
    write_table(tmp_path / "t.csv", ["a", "b"], [[text, 1.5]])
    assert read_table(tmp_path / "t.csv", ["a"]) == [{"a": text, "b": "1.5"}]


def test_tables_saved_by_a_spreadsheet_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeffa;b\r\n1,5;x\r\n", "utf-8")
    assert read_table(tmp_path / "t.csv", ["a", "b"]) == [{"a": "1,5", "b": "x"}]
    with pytest.raises(CourseError, match="lacks the column c"):
        read_table(tmp_path / "t.csv", ["c"])
    (tmp_path / "t.csv").write_bytes("a\né".encode("latin-1"))
    with pytest.raises(CourseError, match="not UTF-8"):
        read_table(tmp_path / "t.csv", ["a"])


def test_two_people_of_one_name_are_not_guessed() -> None:
    people = [{"Student": "Li", "ID": str(n), "SIS User ID": "", "SIS Login ID": "", "Section": ""} for n in (1, 2)]
    roster, absent, unknown = gradebook.match(people, {"Li": "", "Li (2)": "2"})
    assert roster == {"Li (2)": people[1]} and absent == people[:1] and unknown == ["Li"]


def test_slugs_are_distinct_and_safe() -> None:
    names = ["alice", "Alice", "ALICE", "a/b", "a_b", "..", "", "=cmd()", "阮", "院", "x" * 300, "x" * 299, ".hidden"]
    slugs = [slug(name) for name in names]
    assert len({text.lower() for text in slugs}) == len(names) and slugs[0] == "alice"
    assert all(text[0] not in ".-" and len(text) < 80 and "/" not in text for text in slugs)


def test_discrimination_of_an_item() -> None:
    def result(student: str, a: float, b: float) -> Result:
        items = [ItemResult(name, "check", name, name, 1, points, "passed") for name, points in (("a", a), ("b", b))]
        return Result(student, "ex", "graded", items=items)

    same, other = gradebook.item_statistics([result("x", 0, 0), result("y", 1, 1), result("z", 1, 1)])
    assert same["discrimination"] == other["discrimination"] == 1.0
    assert (
        gradebook.item_statistics([result("x", 1, 0), result("y", 1, 1), result("z", 1, 1)])[0]["discrimination"]
        is None
    )
