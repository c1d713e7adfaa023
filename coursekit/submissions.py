"""Which file is whose answer to what: a directory per student, a flat folder of files, or a zip of either.

In a flat folder the name says both: `alice_ex_8_1.ipynb`, or Canvas's `doejane_123_4567_ex_8_1-2.ipynb`; where it
names no exercise, the notebook itself does.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from coursekit.errors import CourseError, SubmissionError
from coursekit.exercise import Exercise
from coursekit.reading import grade_id, named_exercise, read_cells

_CANVAS = re.compile(r"(?P<name>[^_]+)(?:_LATE|_late)?_(?P<id>\d+)_(?P<submission>\d+)_(?P<file>.+)")
_IGNORED = {"__MACOSX", ".ipynb_checkpoints", ".git"}
_MAX_FILES, _MAX_TOTAL = 100_000, 4 << 30


@dataclass(frozen=True)
class Entry:
    """One student's answer to one exercise. path is None where there is none. canvas_id: from Canvas's file names."""

    student: str
    exercise: str
    path: Path | None
    canvas_id: str = ""
    problems: list[str] = field(default_factory=list)
    reason: str = ""


def discover(root: Path, exercises: Sequence[Exercise], max_bytes: int) -> list[Entry]:
    """Every student × every exercise, so that what is missing is an entry as well. Raises CourseError for no directory.

    exercises: those to look for. Where several are given, one that nobody answered is left out.
    """
    if not root.is_dir():
        raise CourseError(f"{root} is no directory of submissions and no zip file")
    students: dict[str, list[Path]] = {}
    canvas: dict[str, str] = {}
    for child in sorted(root.iterdir()):
        if child.name in _IGNORED or child.name.startswith("."):
            continue
        if child.is_dir() and not child.is_symlink():
            students.setdefault(_text(child.name), []).extend(_notebooks(child))
        elif child.suffix.lower() == ".ipynb":
            name, canvas_id = _owner(_text(child.stem), exercises)
            students.setdefault(name, []).append(child)
            canvas[name] = canvas_id
    found: dict[tuple[str, str], list[Path]] = {}
    strays: dict[str, list[str]] = {}
    for student, paths in students.items():
        for path in paths:
            name = _exercise_of(path, exercises, max_bytes)
            if name in {exercise.name for exercise in exercises}:
                found.setdefault((student, name), []).append(path)
            else:
                strays.setdefault(student, []).append(
                    f"{_text(path.name)} is {name or 'no exercise that is graded here'}"
                )
    answered = {name for _, name in found}
    wanted = [exercise.name for exercise in exercises if len(exercises) == 1 or exercise.name in answered]
    return [
        _entry(student, name, found.get((student, name), []), strays.get(student, []), canvas.get(student, ""))
        for student in sorted(students)
        for name in wanted or [exercises[0].name]
    ]


def _entry(student: str, exercise: str, paths: list[Path], strays: list[str], canvas_id: str) -> Entry:
    if not paths:
        reason = "; ".join(strays) if strays else "nothing was submitted"
        return Entry(student, exercise, None, canvas_id, reason=reason)
    newest = max(paths, key=lambda path: (path.lstat().st_mtime, path.name))
    many = f"{len(paths)} files answer this exercise; the newest counts: {_text(newest.name)}"
    return Entry(student, exercise, newest, canvas_id, [many] if len(paths) > 1 else [])


def _notebooks(directory: Path) -> list[Path]:
    paths = []
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in _IGNORED)
        paths += [Path(folder, name) for name in sorted(files) if name.lower().endswith(".ipynb") and name[0] != "."]
    return paths


def _owner(stem: str, exercises: Sequence[Exercise]) -> tuple[str, str]:
    """(student, Canvas id) from the name of a file in a flat folder."""
    match = _CANVAS.fullmatch(stem)
    if match and not any(stem.startswith(exercise.name) for exercise in exercises):
        return f"{match['name']} ({match['id']})", match["id"]  # the name alone may be that of two students
    for exercise in sorted(exercises, key=lambda exercise: -len(exercise.name)):
        before, middle, after = stem.partition(exercise.name)
        if middle:
            return before.strip("_- .") or after.strip("_- .") or stem, ""
    return stem, ""


def _exercise_of(path: Path, exercises: Sequence[Exercise], max_bytes: int) -> str:
    """What a file answers: by its own metadata, else by its answer cells, else by its name (it may be unreadable)."""
    with contextlib.suppress(SubmissionError):
        cells, metadata, _ = read_cells(path, max_bytes)
        named = named_exercise(metadata)
        if named:
            return named
        theirs = {grade_id(cell) for cell in cells} - {""}
        for exercise in exercises:
            ours = {cell.metadata["nbgrader"]["grade_id"] for cell in exercise.cells("answer", "question")}
            if len(exercises) == 1 and theirs & ours:
                return exercise.name
    by_name = sorted((exercise.name for exercise in exercises if exercise.name in path.stem), key=len)
    if by_name:
        return by_name[-1]
    return exercises[0].name if len(exercises) == 1 else ""


def unpack(archive: Path, target: Path, exercises: Sequence[Exercise], max_bytes: int) -> Path:
    """Extract the notebooks of a zip: nothing outside `target`, no links, no more than a course could hand in.

    A file above max_bytes becomes one of just over that size, so that its owner gets the reason. Returns the directory
    to look in, which is below `target` where the archive wraps all in one folder of folders.
    """
    total = 0
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = opened.infolist()
            if len(infos) > _MAX_FILES:
                raise CourseError(f"{archive.name} holds {len(infos)} files; more than {_MAX_FILES} are refused")
            for info in infos:
                parts = [
                    part for part in PurePosixPath(info.filename.replace("\\", "/")).parts if part not in ("/", ".")
                ]
                if not parts or ".." in parts or _IGNORED & set(parts) or stat.S_ISLNK(info.external_attr >> 16):
                    continue
                place = target.joinpath(*(_file_name(part) for part in parts))
                if info.is_dir():
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.suffix.lower() != ".ipynb":
                    continue
                total += _extract(opened, info, place, max_bytes)
                if total > _MAX_TOTAL:
                    raise CourseError(f"{archive.name} unpacks to more than {_MAX_TOTAL >> 30} GiB")
    except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError) as error:
        raise CourseError(f"{archive.name} cannot be unpacked: {error}") from None
    children = [child for child in target.iterdir() if not child.name.startswith(".")]
    if len(children) != 1 or not children[0].is_dir():
        return target
    inside = list(children[0].iterdir())
    names = {exercise.name for exercise in exercises}
    wrapped = any(child.is_dir() for child in inside) or sum(child.stem not in names for child in inside) > 1
    return children[0] if wrapped else target


def _extract(opened: zipfile.ZipFile, info: zipfile.ZipInfo, place: Path, max_bytes: int) -> int:
    written = 0
    with opened.open(info) as source, place.open("wb") as sink:
        while written <= max_bytes and (chunk := source.read(min(1 << 20, max_bytes + 1 - written))):
            sink.write(chunk)
            written += len(chunk)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        stamp = time.mktime((*info.date_time, 0, 0, -1))
        os.utime(place, (stamp, stamp))
    return written


def _file_name(part: str) -> str:
    return part if len(part.encode()) <= 200 else part.encode()[:180].decode("utf-8", "ignore") + part[-6:]


def _text(name: str) -> str:
    """A file name as text that can be written anywhere (a name on disk may be no valid UTF-8)."""
    return name.encode("utf-8", "replace").decode()
