"""`course check`, `course run`, the authors' helper, and the command line around them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from coursekit.authoring import UNSOLVED, failures, try_answers
from coursekit.check import Checked, Part, check, find, report
from coursekit.cli import main
from coursekit.errors import CourseError
from coursekit.exercise import Exercise
from coursekit.kernel import Limits
from coursekit.release import release_notebook
from coursekit.run import normalised, run_in_place
from tests.coursekit import sample


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    """Copies of students in several states, checked together."""
    root = tmp_path_factory.mktemp("copies")
    books = {
        "right": sample.submission(root / "s"),
        "wrong": sample.submission(
            root / "s", answer_a="def kv_gib(t, b):\n    return t * b / 1e9", answer_b=sample.BLOCKS
        ),
        "edited": sample.submission(root / "s"),
        "lost": sample.submission(root / "s"),
        "blank": sample.submission(root / "s", question_c="YOUR ANSWER HERE"),
        "no answer cell": sample.submission(root / "s"),
        "dead": sample.submission(root / "s", answer_a="import os\nos._exit(0)"),
        "shadow": sample.submission(root / "s"),
    }
    for cell in books["edited"].cells:
        if cell["id"] == "check-a":
            cell.source = "pass"
    books["lost"].cells = [cell for cell in books["lost"].cells if cell["id"] != "check-b"]
    books["no answer cell"].cells = [cell for cell in books["no answer cell"].cells if cell["id"] != "answer-a"]
    for name, book in books.items():
        for cell in book.cells:
            if cell.cell_type == "code":  # as a notebook is after it was run: nbval must not compare with these
                cell.outputs, cell.execution_count = [new_output("stream", text="old\n")], 7
        (root / name).mkdir()
        (root / name / "ex_0_1.ipynb").write_text(sample.as_json(book), "utf-8")
        (root / name / "conftest.py").write_text("raise SystemExit('must not run')", "utf-8")
    (root / "shadow" / "json.py").write_text("raise RuntimeError('not the library')", "utf-8")
    paths = [root / name / "ex_0_1.ipynb" for name in books]
    return dict(zip(books, check(paths, Limits(), workers=2, progress=False), strict=True))


def outcomes(checked: Checked) -> list[str]:
    return [part.outcome for part in checked.parts]


def test_a_right_copy_passes(checked: dict[str, Checked]) -> None:
    assert checked["right"].passed and outcomes(checked["right"]) == ["passed", "passed", "open"]
    assert "2 of 2 parts pass, 5 of 5 points" in report(checked["right"])


def test_a_wrong_copy_is_told_what_and_where_to_read(checked: dict[str, Checked]) -> None:
    assert not checked["wrong"].passed and outcomes(checked["wrong"]) == ["failed", "passed", "open"]
    text = report(checked["wrong"])
    assert "✗ a  KV in GiB" in text and "GB instead of GiB" in text and "Read next: chapter 01; book 8.1.2" in text
    assert "1 of 2 parts pass, 3 of 5 points" in text and "4 points, read by your instructor" in text


@pytest.mark.parametrize("points, says", [(1, "1 point, read"), (2, "2 points, read"), (0.5, "0.5 points, read")])
def test_one_point_is_no_points(points: float, says: str) -> None:
    parts = [Part("Explain", 0.0, points, "open"), Part("Count", 1.0, 1.0, "passed")]
    text = report(Checked("ex_0_1", "Warming up", parts, []))
    assert f"{says} by your instructor" in text and text.splitlines()[-2].endswith("1 of 1 point.")


def test_edited_and_lost_cells_are_noticed(checked: dict[str, Checked]) -> None:
    assert checked["edited"].problems == ["the locked cell check-a was edited; grading uses the original"]
    assert not checked["edited"].passed and outcomes(checked["edited"]) == ["died", "passed", "open"]
    assert "what it says does not count" in report(checked["edited"])
    assert outcomes(checked["lost"]) == ["passed", "died", "open"] and "no longer in the notebook" in report(
        checked["lost"]
    )


def test_a_lost_answer_cell_is_told(checked: dict[str, Checked]) -> None:
    assert outcomes(checked["no answer cell"]) == ["died", "passed", "open"]
    assert "its answer cell is no longer in the notebook; take a fresh copy" in report(checked["no answer cell"])


def test_an_open_question_shows_whether_it_is_answered(checked: dict[str, Checked]) -> None:
    answered, blank = (report(checked[name]).splitlines()[3] for name in ("right", "blank"))
    assert re.fullmatch(r"  \? c  Why blocks +4 points, read by your instructor", answered)
    assert re.fullmatch(r"  · c  Why blocks +4 points, read by your instructor; not answered yet", blank)


def test_a_dead_kernel_is_said(checked: dict[str, Checked]) -> None:
    assert outcomes(checked["dead"]) == ["died", "died", "open"]


def test_files_beside_the_notebook_do_not_break_the_check(checked: dict[str, Checked]) -> None:
    assert checked["shadow"].passed


def test_what_is_no_exercise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no exercises in"):
        find([], tmp_path)
    with pytest.raises(CourseError, match="no exercise 'ex_9'"):
        find(["ex_9"], tmp_path)
    (tmp_path / "x.ipynb").write_text(nbformat.writes(new_notebook()), "utf-8")
    with pytest.raises(CourseError, match="not an exercise of this course"):
        check([tmp_path / "x.ipynb"], Limits())
    (tmp_path / "x.ipynb").write_text("{", "utf-8")
    with pytest.raises(CourseError, match="x.ipynb stops in the middle|x.ipynb is not a notebook"):
        check([tmp_path / "x.ipynb"], Limits())


def test_authors_see_every_variant(tmp_path: Path) -> None:
    path = sample.write_solution(tmp_path)
    runs = try_answers(
        path,
        {
            "unsolved": UNSOLVED,
            "solved": {},
            "GB": {"answer-a": "def kv_gib(t, b):\n    return t * b / 1e9"},
            "hard-coded": {"answer-b": "def blocks(t, b):\n    return 7"},
        },
    )
    assert failures(runs["solved"]) == {}
    assert set(failures(runs["unsolved"])) == {"check-a", "check-b"}
    assert {item.outcome for item in runs["unsolved"].values()} == {"unsolved"}
    assert list(failures(runs["GB"])) == ["check-a"] and "GB instead of GiB" in failures(runs["GB"])["check-a"]
    assert runs["hard-coded"]["check-b"].outcome == "hidden"
    with pytest.raises(KeyError, match="answer-z"):
        try_answers(path, {"typo": {"answer-z": ""}})


def chapter(*sources: str) -> nbformat.NotebookNode:
    book = new_notebook(cells=[new_code_cell(source) for source in sources])
    book.metadata = {"widgets": {"state": 1}, "language_info": {"version": "3.11.7"}, "kernelspec": {"name": "python3"}}
    return book


def test_run_stores_the_same_twice(tmp_path: Path) -> None:
    path = tmp_path / "chapter.ipynb"
    path.write_text(nbformat.writes(chapter("print(1)\nprint(2)", "", "open('here.txt').read()", "6 * 7")), "utf-8")
    (tmp_path / "here.txt").write_text("beside", "utf-8")
    cells: list[int] = []
    assert run_in_place(path, 60, lambda: cells.append(1)).changed and len(cells) >= 3
    first = path.read_text("utf-8")
    assert not run_in_place(path, 60).changed and path.read_text("utf-8") == first
    book = json.loads(first)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert [cell["id"] for cell in book["cells"]] == ["cell-0", "cell-1", "cell-2", "cell-3"]
    assert [cell["execution_count"] for cell in book["cells"]] == [1, None, 2, 3]
    assert book["cells"][0]["outputs"][0]["text"] == ["1\n", "2\n"]
    assert book["metadata"]["language_info"] == {"name": "python"} and "widgets" not in book["metadata"]
    assert "execution" not in book["cells"][0]["metadata"]


def test_a_notebook_that_fails_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "chapter.ipynb"
    path.write_text(nbformat.writes(chapter("1 / 0")), "utf-8")
    before = path.read_text("utf-8")
    ran = run_in_place(path, 60)
    assert "ZeroDivisionError" in ran.error and path.read_text("utf-8") == before


def test_normalising_drops_what_chance_put_there() -> None:
    book = chapter("x")
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "3f"}, "text/plain": "IntSlider()"}
    book.cells[0].outputs = [
        new_output("display_data", data=dict(widget)),
        new_output("display_data", data={**widget, "image/png": "AAAA"}),
        new_output("stream", name="stdout", text="a"),
        new_output("stream", name="stdout", text="b"),
    ]
    book.cells[0].metadata["execution"] = {"iopub.status.busy": "2026-01-01"}
    (cell,) = normalised(book).cells
    assert [dict(output.get("data", {})) for output in cell.outputs] == [{"image/png": "AAAA"}, {}]
    assert cell.outputs[1].text == "ab" and not cell.metadata
    book.cells[0]["id"] = "a-readable-one"
    assert normalised(book).cells[0]["id"] == "a-readable-one"


WIDGETS = """
from ipywidgets import IntSlider, interactive, interactive_output
slider = IntSlider(3)
shown = interactive(lambda n: print(n * 2), n=slider)
display(shown, interactive_output(lambda n: print(n * 3), {"n": slider}))
slider.value = 7
print("drawn for", shown.kwargs["n"])
"""


def test_run_leaves_no_widget_state(tmp_path: Path) -> None:
    """Interactive cells run (nbclient's Output widget needs their state meanwhile), and no trace of them is stored."""
    path = tmp_path / "chapter.ipynb"
    path.write_text(nbformat.writes(chapter(WIDGETS, "print(shown.children[0].value)")), "utf-8")
    ran = run_in_place(path, 60)
    assert (ran.error, ran.changed) == ("", True)
    first = path.read_text("utf-8")
    assert "widget" not in json.dumps([cell.get("outputs") for cell in json.loads(first)["cells"]])
    assert "widgets" not in json.loads(first)["metadata"] and "model_id" not in first
    texts = ["".join(output.text for output in cell.outputs) for cell in nbformat.reads(first, 4).cells]
    assert texts[0].endswith("drawn for 7\n") and texts[1] == "7\n"
    assert not run_in_place(path, 60).changed and path.read_text("utf-8") == first


def course(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    root = Path(__file__).resolve().parents[2]
    env = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "coursekit.cli", *arguments],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_course_from_end_to_end(tmp_path: Path) -> None:
    sample.write_solution(tmp_path / "solutions")
    assert course(tmp_path, "release", "--check")[0] == 1
    assert course(tmp_path, "release")[:2] == (0, "wrote exercises/ex_0_1.ipynb\n")
    assert course(tmp_path, "release", "--check", "--json")[:2] == (0, '{\n "in_step": true,\n "reasons": []\n}\n')
    code, out, err = course(tmp_path, "check", "ex_0_1", "--json")
    assert (code, err) == (1, "")
    assert [part["outcome"] for part in json.loads(out)[0]["parts"]] == ["unsolved", "unsolved", "open"]
    code, out, _ = course(tmp_path, "grade", "exercises", "--out", "out", "--json")
    summary = json.loads(out)
    assert (
        code == 0 and summary["complete"] and summary["statuses"] == {"graded": 1} and summary["questions_waiting"] == 1
    )
    (tmp_path / "exercises" / "bob_ex_0_1.ipynb").write_text("{", "utf-8")
    code, out, _ = course(tmp_path, "grade", "exercises", "--out", "out")
    assert (
        code == 1
        and "1 graded, 1 refused (1 kept from before)" in out
        and "bob, ex_0_1: refused, stops in the middle" in out
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["release"], "no solution notebook"),
        (["check"], "no exercises in"),
        (["run", "nowhere"], "no notebook at nowhere"),
        (["grade", "nowhere", "--out", "o"], "no solution notebook"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("course: ") and message in errors and errors.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["release"], ["check"], ["run"], ["grade"]])
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0 and re.search(r"examples:\n  course ", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments", [["grade", "x"], ["check", "--jobs", "0"], ["nonsense"], ["check", "--timeout", "nan"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


def test_coursekit_knows_nothing_of_inference() -> None:
    """Neither torch nor the engine is imported: a check costs a kernel, not torch's second."""
    code = (
        "import sys, coursekit.cli, coursekit.worker, coursekit.authoring, coursekit.kernel_main, coursekit.checks\n"
        "print([name for name in ('torch', 'mini_engine', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_short_name_is_enough_where_it_is_the_only_one(tmp_path: Path) -> None:
    from coursekit.release import by_name

    there = {stem: tmp_path / f"{stem}.ipynb" for stem in ("ex_8_1_reads", "ex_8_2_chunks", "ex_8_2_gaps", "ex_8_10_x")}
    assert by_name("ex_8_1", there) == there["ex_8_1_reads"]
    assert by_name("ex_8_2_gaps", there) == there["ex_8_2_gaps"]
    assert by_name("ex_8_2", there) is None and by_name("ex_9", there) is None


def test_an_answer_that_does_not_even_run_is_named(tmp_path: Path) -> None:
    solution = Path(__file__).parents[2] / "solutions" / "ex_8_1_reads_and_capacity.ipynb"
    released = release_notebook(Exercise.load(solution))
    answer = next(cell for cell in released.cells if cell.metadata.get("textbook", {}).get("kind") == "answer")
    answer.source = "def broken(:\n    pass"
    path = tmp_path / "ex_8_1.ipynb"
    path.write_text(nbformat.writes(released), "utf-8")
    [checked] = check([path], Limits(), progress=False)
    assert checked.parts[0].message == (
        "The answer cell of part a itself fails with SyntaxError: invalid syntax (line 1 of the cell). "
        "Mend the cell, then run it again."
    )
    assert "itself fails" not in checked.parts[1].message
