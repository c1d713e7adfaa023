"""Finding and reading what students hand in, whatever state it is in."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from coursekit.errors import CourseError, SubmissionError
from coursekit.exercise import Exercise, kind_of
from coursekit.reading import Submission, read_submission
from coursekit.rebuild import rebuild
from coursekit.submissions import Entry, discover, unpack
from tests.coursekit import sample

LIMIT = 1_000_000


@pytest.fixture
def exercise(tmp_path: Path) -> Exercise:
    return sample.exercise(tmp_path / "solutions")


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "in.ipynb"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def text(tmp_path: Path) -> str:
    return sample.as_json(sample.submission(tmp_path / "solutions"))


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\x89PNG\r\n", "is not a notebook"),
        (b"\xff\xfe\x00", "is not a notebook"),
        (b'{"cells": [{"cell_type": "co', "stops in the middle"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1, 2]", "has no list of cells"),
        (b'{"cells": {"a": 1}}', "has no list of cells"),
        (b'{"worksheets": 3}', "old notebook format that cannot be converted"),
        (b'{"cells": [null, 3, {"cell_type": "code"}]}', "none of the answer cells"),
        (b'{"cells": [], "metadata": {"textbook": {"exercise": "ex_7_7"}}}', "is an answer to ex_7_7, not to ex_0_1"),
        (b'{"cells": [], "metadata": [], "x": "' + b"x" * LIMIT + b'"}', "is 1 MB; the limit is 1 MB"),
    ],
)
def test_what_cannot_be_read_has_a_reason(tmp_path: Path, exercise: Exercise, content: bytes, reason: str) -> None:
    with pytest.raises(SubmissionError) as caught:
        read_submission(written(tmp_path, content), exercise, LIMIT)
    assert reason in str(caught.value)


def test_links_and_pipes_are_not_followed(tmp_path: Path, exercise: Exercise) -> None:
    link, pipe = tmp_path / "link.ipynb", tmp_path / "pipe.ipynb"
    link.symlink_to(written(tmp_path, text(tmp_path)))
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(SubmissionError, match="a link or a special file"):
            read_submission(path, exercise, LIMIT)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_of_other_editors(tmp_path: Path, exercise: Exercise, encoding: str) -> None:
    read = read_submission(written(tmp_path, text(tmp_path).encode(encoding)), exercise, LIMIT)
    assert read.answers["answer-b"] == sample.RIGHT["answer-b"] and not read.problems


def test_format_3_is_converted(tmp_path: Path, exercise: Exercise) -> None:
    old = nbformat.convert(sample.submission(tmp_path / "solutions"), 3)
    read = read_submission(written(tmp_path, json.dumps(old)), exercise, LIMIT)
    assert read.answers["answer-a"] == sample.RIGHT["answer-a"]
    assert "old format 3" in read.problems[0]


def test_cell_ids_may_be_lost(tmp_path: Path, exercise: Exercise) -> None:
    book = json.loads(text(tmp_path))
    for cell in book["cells"]:
        del cell["id"]
        cell["source"] = cell["source"].splitlines(keepends=True)
    book["nbformat_minor"] = 0
    assert read_submission(written(tmp_path, json.dumps(book)), exercise, LIMIT).answers == sample.RIGHT


def test_an_answer_that_was_copied_counts_where_it_was_filled_in(tmp_path: Path, exercise: Exercise) -> None:
    book = json.loads(text(tmp_path))
    (answer,) = (cell for cell in book["cells"] if cell["id"] == "answer-a")
    book["cells"].append(dict(answer, source="def kv_gib(t, b):\n    raise NotImplementedError('part a')"))
    read = read_submission(written(tmp_path, json.dumps(book)), exercise, LIMIT)
    assert read.answers["answer-a"] == sample.RIGHT["answer-a"]
    assert "is there 2 times" in read.problems[0]
    book["cells"].append(dict(answer, source="second = 1"))
    assert read_submission(written(tmp_path, json.dumps(book)), exercise, LIMIT).answers["answer-a"] == "second = 1"


def test_missing_and_retyped_answers_are_named(tmp_path: Path, exercise: Exercise) -> None:
    book = json.loads(text(tmp_path))
    book["cells"] = [cell for cell in book["cells"] if cell["id"] != "answer-a"]
    (answer,) = (cell for cell in book["cells"] if cell["id"] == "answer-b")
    answer["cell_type"] = "markdown"
    read = read_submission(written(tmp_path, json.dumps(book)), exercise, LIMIT)
    assert read.problems == [
        "the answer cell answer-b was changed to 'markdown'; its text was taken anyway",
        "answer cells are missing: answer-a",
    ]
    assert "answer-b" in read.answers


def test_lone_surrogates_do_not_stop_anything(tmp_path: Path, exercise: Exercise) -> None:
    content = text(tmp_path).replace("So that no memory", "\\ud800 memory")
    read = read_submission(written(tmp_path, content), exercise, LIMIT)
    assert read.answers["question-c"].encode().startswith(b"? memory")


def test_rebuilt_from_our_cells(tmp_path: Path, exercise: Exercise) -> None:
    """Edited checks, tags and outputs stay behind; the student's own helper cells come along, in place."""
    book = json.loads(text(tmp_path))
    for cell in book["cells"]:
        cell["metadata"]["tags"] = ["nbval-skip"]
        if cell["id"] == "check-a":
            cell["source"] = "pass"
    helper = json.loads(json.dumps(new_code_cell("helper = 1", metadata={"tags": ["raises-exception"]})))
    book["cells"].insert([cell["id"] for cell in book["cells"]].index("answer-b"), helper)
    rebuilt = rebuild(exercise, read_submission(written(tmp_path, json.dumps(book)), exercise, LIMIT))
    assert [cell.metadata["nbgrader"]["grade_id"] for cell in rebuilt.cells if cell.metadata] == [
        "setup", "answer-a", "check-a", "extra-check-a-0", "answer-b", "check-b", "probe-a", "probe-b",
    ]  # fmt: skip
    sources = {cell.metadata["nbgrader"]["grade_id"]: cell.source for cell in rebuilt.cells if cell.metadata}
    assert sources["check-a"] == sample.CHECK_GIB.strip() and sources["extra-check-a-0"] == "helper = 1"
    assert not any("tags" in cell.metadata or cell.outputs for cell in rebuilt.cells)
    assert kind_of(rebuilt.cells[4]) == kind_of(rebuilt.cells[2]) == "student"


def test_a_missing_answer_is_an_unsolved_one(exercise: Exercise) -> None:
    rebuilt = rebuild(exercise, Submission({}))
    assert "raise NotImplementedError" in rebuilt.cells[2].source and "total" not in rebuilt.cells[2].source


def place(root: Path, tmp_path: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text(tmp_path), "utf-8")


def found(root: Path, exercise: Exercise) -> dict[str, Entry]:
    return {entry.student: entry for entry in discover(root, [exercise], LIMIT)}


def test_a_directory_per_student(tmp_path: Path, exercise: Exercise) -> None:
    root = tmp_path / "in"
    place(
        root,
        tmp_path,
        "alice/ex_0_1.ipynb",
        "bob/deep/er/whatever.ipynb",
        "__MACOSX/x.ipynb",
        "eve/.ipynb_checkpoints/e.ipynb",
    )
    (root / "carol").mkdir()
    entries = found(root, exercise)
    assert {name: entry.path is not None for name, entry in entries.items()} == {
        "alice": True, "bob": True, "carol": False, "eve": False,
    }  # fmt: skip
    assert entries["carol"].reason == "nothing was submitted"


def test_a_flat_folder(tmp_path: Path, exercise: Exercise) -> None:
    root = tmp_path / "in"
    names = (
        "alice_ex_0_1.ipynb",
        "doejane_LATE_12_345_ex_0_1-2.ipynb",
        "zoé 'q\" =x.ipynb",
        "ex_0_1_bob.ipynb",
        "阮.ipynb",
    )
    place(root, tmp_path, *names)
    entries = found(root, exercise)
    assert set(entries) == {"alice", "doejane (12)", "zoé 'q\" =x", "bob", "阮"}
    assert entries["doejane (12)"].canvas_id == "12"


def test_the_newest_of_several_counts(tmp_path: Path, exercise: Exercise) -> None:
    place(tmp_path / "in", tmp_path, "a/z.ipynb", "a/b.ipynb")
    os.utime(tmp_path / "in/a/z.ipynb", (1, 1))
    entry = found(tmp_path / "in", exercise)["a"]
    assert entry.path and entry.path.name == "b.ipynb" and "2 files answer" in entry.problems[0]


def test_a_wrong_exercise_is_named(tmp_path: Path, exercise: Exercise) -> None:
    place(tmp_path / "in", tmp_path, "a/ex_0_1.ipynb")
    path = tmp_path / "in/a/ex_0_1.ipynb"
    path.write_text(path.read_text("utf-8").replace('"ex_0_1"', '"ex_5_5"'), "utf-8")
    assert found(tmp_path / "in", exercise)["a"].reason == "ex_0_1.ipynb is ex_5_5"


def test_a_broken_file_is_its_owners(tmp_path: Path, exercise: Exercise) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "alice_ex_0_1.ipynb").write_text("{", "utf-8")
    entry = found(tmp_path / "in", exercise)["alice"]
    assert entry.path and entry.exercise == "ex_0_1"


def archive(tmp_path: Path, *members: tuple[str, str | bytes]) -> Path:
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members:
            opened.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "names, students",
    [
        (["alice/ex_0_1.ipynb", "bob/ex_0_1.ipynb"], {"alice", "bob"}),
        (["all/alice/ex_0_1.ipynb", "all/bob/ex_0_1.ipynb"], {"alice", "bob"}),
        (["alice/ex_0_1.ipynb"], {"alice"}),
        (["all/alice_ex_0_1.ipynb", "all/bob_ex_0_1.ipynb"], {"alice", "bob"}),
        (["alice_ex_0_1.ipynb"], {"alice"}),
        (["../evil/ex_0_1.ipynb", "/abs/ex_0_1.ipynb", "ok/ex_0_1.ipynb", "ok/readme.txt"], {"abs", "ok"}),
    ],
)
def test_a_zip(tmp_path: Path, exercise: Exercise, names: list[str], students: set[str]) -> None:
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    zipped = archive(tmp_path, *((name, text(tmp_path)) for name in names))
    assert set(found(unpack(zipped, target, [exercise], LIMIT), exercise)) == students
    assert not (tmp_path / "deep" / "evil").exists() and not Path("/abs").exists()


def test_a_zip_bomb_gives_its_owner_a_reason(tmp_path: Path, exercise: Exercise) -> None:
    zipped = archive(tmp_path, ("a/ex_0_1.ipynb", b"0" * 50_000_000), ("b/ex_0_1.ipynb", text(tmp_path)))
    (tmp_path / "target").mkdir()
    entries = found(unpack(zipped, tmp_path / "target", [exercise], LIMIT), exercise)
    path = entries["a"].path
    assert path and path.stat().st_size == LIMIT + 1
    with pytest.raises(SubmissionError, match="the limit is"):
        read_submission(path, exercise, LIMIT)


def test_no_zip_at_all(tmp_path: Path, exercise: Exercise) -> None:
    with pytest.raises(CourseError, match="cannot be unpacked"):
        unpack(written(tmp_path, "PK nonsense"), tmp_path / "target", [exercise], LIMIT)
