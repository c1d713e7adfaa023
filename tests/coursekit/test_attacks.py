"""One class in which all but one attack the grader: each gets what it earns, and the one is none the worse for it."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from coursekit import cells
from coursekit.exercise import Exercise
from coursekit.grade import Options, grade
from coursekit.kernel import Limits
from coursekit.reading import Submission
from coursekit.rebuild import rebuild
from coursekit.result import Result, path_of
from coursekit.runner import Job, run_notebooks
from tests.coursekit import sample
from tests.coursekit.attacks import ATTACKS

ROOT = Path(cells.__file__).resolve().parent.parent
LIMITS = Limits(cell_seconds=4, notebook_seconds=40, memory_bytes=4 << 30)
FILES = {
    "truncated": b'{"cells": [{"cell_type": "code", "sou',
    "no json": b"\x00\x01 this is a PDF",
    "wrong exercise": b'{"nbformat": 4, "cells": [], "metadata": {"textbook": {"exercise": "ex_6_6"}}}',
    "=cmd() 'q\" <b>阮</b>": b"",
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    root = tmp_path_factory.mktemp("class")
    for name, attack in ATTACKS.items():
        place = root / "in" / name
        place.mkdir(parents=True)
        book = sample.submission(root / "solutions", answer_a=attack.a, answer_b=attack.b)
        if name == "skipped cells":  # its own checks and tags are not those that count
            for cell in book.cells:
                cell.metadata["tags"] = ["nbval-skip", "raises-exception"]
                cell.source = cell.source if "check" not in cell["id"] else "pass"
        (place / "ex_0_1.ipynb").write_text(sample.as_json(book), "utf-8")
        (place / "conftest.py").write_text(f"open({str(root / 'conftest-ran')!r}, 'w')", "utf-8")
    for name, content in FILES.items():
        (root / "in" / name.replace("/", "∕")).mkdir()
        (root / "in" / name.replace("/", "∕") / "ex_0_1.ipynb").write_bytes(content)
    exercise = Exercise.load(root / "solutions" / "ex_0_1.ipynb")
    summary = grade(root / "in", [exercise], root / "out", Options(LIMITS, jobs=2, progress=False))
    return root, {result.student: result for result in summary.results}


@pytest.mark.parametrize("name", ATTACKS)
def test_each_gets_what_it_earns(graded: tuple[Path, dict[str, Result]], name: str) -> None:
    result, attack = graded[1][name], ATTACKS[name]
    items = {item.part: item for item in result.items}
    assert (items["a"].outcome, items["b"].outcome) == (attack.outcome_a, attack.outcome_b), result
    assert result.points == attack.points and result.status == "graded"
    assert attack.says in items["a"].message + items["b"].message


@pytest.mark.parametrize(
    "name, reason",
    [
        ("truncated", "stops in the middle"),
        ("no json", "is not a notebook"),
        ("wrong exercise", "is ex_6_6"),
        ("=cmd() 'q\" <b>阮<∕b>", "is empty"),
    ],
)
def test_each_broken_file_has_its_reason(graded: tuple[Path, dict[str, Result]], name: str, reason: str) -> None:
    result = graded[1][name]
    assert reason in result.reason and result.points == 0 and result.status in ("refused", "missing")


def test_no_hidden_input_reaches_a_student(graded: tuple[Path, dict[str, Result]]) -> None:
    pages = list((graded[0] / "out").rglob("*.html")) + list((graded[0] / "out").rglob("*.json"))
    assert len(pages) > 2 * len(ATTACKS)
    assert [path for path in pages if sample.HIDDEN in path.read_text("utf-8")] == []


def test_names_are_escaped(graded: tuple[Path, dict[str, Result]]) -> None:
    root, results = graded
    odd = next(name for name in results if name.startswith("=cmd"))
    page = path_of(root / "out" / "feedback", odd, "ex_0_1", ".html").read_text("utf-8")
    assert "<b>阮" not in page and "&lt;b&gt;阮" in page
    table = (root / "out" / "gradebook.csv").read_text("utf-8-sig")
    assert "'=cmd()" in table and "\n=cmd" not in table and '"=cmd' not in table


def test_nothing_of_theirs_ran_in_the_grader_or_is_left(graded: tuple[Path, dict[str, Result]]) -> None:
    assert not (graded[0] / "conftest-ran").exists()
    # Zombies are nobody's: they only wait to be reaped by whoever is the parent.
    alive = [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and "71.25" in (process.info["cmdline"] or [])
    ]
    assert alive == []


def test_plain_nbval_agrees(tmp_path: Path) -> None:
    """Where nothing is attacked, our run is nbval's own: the same cells pass and fail under `pytest --nbval-lax`."""
    exercise = sample.exercise(tmp_path)
    answers = {"answer-a": "kv_gib = lambda t, b: 1 / 0", "answer-b": "%%capture\n" + sample.BLOCKS}
    notebook = rebuild(exercise, Submission(answers, {"check-a": ["1 / 0"]}))
    (tmp_path / "nb.ipynb").write_text(cells.dumps(copy.deepcopy(notebook)), "utf-8")
    options = ["--nbval-lax", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir=."]
    command = [sys.executable, "-m", "pytest", *options, "nb.ipynb"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    plain = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120).stdout
    theirs = {int(n): word for word, n in re.findall(r"^(PASSED|FAILED) nb\.ipynb::Cell (\d+)", plain, re.M)}
    (run,) = run_notebooks([Job("x", notebook)], LIMITS)
    ours = {index: "PASSED" if cell.status == "ok" else "FAILED" for index, cell in enumerate(run.cells.values())}
    assert theirs == ours and set(ours.values()) == {"PASSED", "FAILED"}


def test_what_ended_a_kernel_is_known(tmp_path: Path) -> None:
    """And that it is ended: without the caps these would print, or sleep, until something else stops them."""
    limits = Limits(cell_seconds=3, notebook_seconds=12, output_bytes=5_000_000)
    sources = {
        "died": ["import os; os._exit(3)", "1"],
        "flood": ["import time\nfor _ in range(60): print('x' * 200_000, flush=True); time.sleep(0.01)", "1"],
        "overtime": ["import time"] + ["time.sleep(2.8)"] * 6,
        "stuck": ["import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)", "1"],
    }
    jobs = []
    for name, cell_sources in sources.items():
        jobs.append(Job(name, new_notebook(cells=[new_code_cell(source) for source in cell_sources])))
    runs = {run.key: run for run in run_notebooks(jobs, limits, workers=2)}
    assert {name: run.fate for name, run in runs.items()} == {name: name for name in sources}
    for name in ("died", "flood"):
        assert [cell.status for cell in runs[name].cells.values()] == [name, "not_run"]
    assert [cell.status for cell in runs["stuck"].cells.values()] == ["timeout", "not_run"]
    assert all(len(cell.text) <= limits.kept_bytes for cell in runs["flood"].cells.values())
