"""The student edition as a zip: the course without solutions, hidden probes, and what tests tell of them."""

from __future__ import annotations

import os
import subprocess
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat

from coursekit.cells import BEGIN_HIDDEN, BEGIN_SOLUTION, END_HIDDEN, END_SOLUTION
from coursekit.errors import CourseError
from coursekit.exercise import Exercise
from coursekit.release import find_exercises, out_of_step

_NEVER = {
    ".git",
    ".venv",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".hypothesis",
    ".ci",
}
_TESTS_OF_ANSWERS = ("solutions", "exercises", "coursekit", "notebooks")
_EPOCH = (2020, 1, 1, 0, 0, 0)  # one time for all files: the same course makes the same zip
_MIN_SECRET = 60  # characters; a shorter answer may well stand in a chapter too


def bundle(root: Path, solutions: Path, exercises: Path, target: Path) -> list[str]:
    """Write the zip and return the names in it. Raises CourseError where exercises are out of step or a secret would
    be in it."""
    late = out_of_step(solutions, exercises)
    if late:
        raise CourseError(
            "the exercises are out of step with their solutions, run `course release` first: " + "; ".join(late)
        )
    secrets = list(_secrets(find_exercises(solutions)))
    paths = [path for path in _files(root) if _handed_out(path, root, solutions) and path.resolve() != target.resolve()]
    for path in paths:
        leak = next((name for name, secret in secrets if secret in _content(path)), None)
        if leak:
            raise CourseError(f"{path.relative_to(root)} contains {leak}; nothing was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    top = target.stem
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            info = zipfile.ZipInfo(f"{top}/{path.relative_to(root).as_posix()}", _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (path.stat().st_mode & 0o777) << 16
            archive.writestr(info, path.read_bytes())
    os.replace(partial, target)
    return [path.relative_to(root).as_posix() for path in paths]


def _files(root: Path) -> list[Path]:
    """What belongs to the course: what git does not ignore, or, outside git, what is no cache."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=False) if (root / ".git").exists() else None
    if listed and listed.returncode == 0:
        paths = [root / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def _handed_out(path: Path, root: Path, solutions: Path) -> bool:
    parts = path.relative_to(root).parts
    if _NEVER & set(parts) or path.resolve().is_relative_to(solutions.resolve()):
        return False
    if parts[0] == "tests":
        own = path.suffix == ".py" and any(
            word in path.read_text("utf-8") for word in ("solutions/", "coursekit.authoring")
        )
        return not own and not set(parts[1:-1]) & set(_TESTS_OF_ANSWERS)
    return True


def _secrets(exercises: Sequence[Exercise]) -> Iterator[tuple[str, str]]:
    """(what it is, its text) of every hidden probe and every answer long enough to be recognised."""
    for exercise in exercises:
        for cell in exercise.cells("probe", "answer", "question"):
            name = f"{cell.metadata['nbgrader']['grade_id']} of {exercise.name}"
            for secret in _between(cell.source):
                if len(secret) >= _MIN_SECRET or cell.metadata["textbook"]["kind"] == "probe":
                    yield name, secret


def _between(source: str) -> Iterator[str]:
    lines: list[str] | None = None
    for line in source.splitlines():
        if line.strip() in (BEGIN_HIDDEN, BEGIN_SOLUTION):
            lines = []
        elif line.strip() in (END_HIDDEN, END_SOLUTION) and lines is not None:
            text = textwrap.dedent("\n".join(lines)).strip()
            if text:
                yield text
            lines = None
        elif lines is not None:
            lines.append(line)


def _content(path: Path) -> str:
    """A file's text; of a notebook, its cells as they read, each line without its indentation's surplus."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""
    if path.suffix != ".ipynb":
        return text
    return "\n".join(textwrap.dedent(cell.source) for cell in nbformat.reads(text, as_version=4).cells)
