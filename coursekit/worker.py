"""A batch of notebooks under nbval, in one pytest run and one process of its own.

    python -m coursekit.worker JOBS_FILE FD

JOBS_FILE: {"jobs": [{"key", "notebook", "cwd"}], "limits": {…}}. To the file descriptor FD goes one JSON line when a
notebook starts and one when it is done, so that whatever ends this process costs at most the notebook it was at.
nbval runs and compares (lax: stored outputs count where a cell asks for it); the kernel under it is coursekit.kernel's.
"""

from __future__ import annotations

import coursekit.startup  # noqa: F401

# isort: split
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

from coursekit.kernel import GradingKernel, Limits

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_TEXT = 250_000
STUDENT = "student"


class ExerciseFile(IPyNbFile):
    """One notebook: nbval's collector with our kernel, in lax mode, deaf to markers in a student's own cells."""

    plugin: WorkerPlugin

    def setup(self) -> None:
        self.plugin.emit({"event": "start", "key": self.plugin.key(self.path)})
        self.kernel = self.plugin.take_kernel(self.path)
        self.kernel.wait_ready()
        self.setup_sanitize_files()

    def collect(self) -> Iterator[IPyNbCell]:
        self.compare_outputs = False  # lax, as --nbval-lax; that flag would make nbval collect the file a second time
        for item in super().collect():
            if item.cell.metadata.get("textbook", {}).get("kind") == STUDENT:
                item.options = defaultdict(bool, {"check": False})
            yield item

    def teardown(self) -> None:
        fate = self.kernel.fate if self.kernel else "died"
        if self.kernel:
            self.kernel.stop()
        self.plugin.finish(self.path, fate)


class WorkerPlugin:
    def __init__(self, jobs: list[dict[str, str]], limits: Limits, fd: int, scratch: Path) -> None:
        self.limits = limits
        self._scratch = scratch
        self._fd = fd
        self._jobs = {str(Path(job["notebook"]).resolve()): job for job in jobs}
        self._cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._started: dict[str, float] = {}

    def key(self, path: Path) -> str:
        return self._jobs[str(path)]["key"]

    def emit(self, event: dict[str, Any]) -> None:
        os.write(self._fd, (json.dumps(event) + "\n").encode())

    def take_kernel(self, path: Path) -> GradingKernel:
        self._started[str(path)] = time.monotonic()
        return GradingKernel(Path(self._jobs[str(path)]["cwd"]), self.limits, self._scratch)

    def finish(self, path: Path, fate: str | None) -> None:
        seconds = round(time.monotonic() - self._started.get(str(path), time.monotonic()), 3)
        done = {"event": "done", "key": self.key(path), "fate": fate, "seconds": seconds}
        self.emit({**done, "cells": self._cells.pop(str(path), [])})

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> ExerciseFile | None:
        if str(file_path) not in self._jobs:
            return None
        collector = ExerciseFile.from_parent(parent, path=file_path)
        collector.plugin = self
        return collector

    def pytest_collection_finish(self) -> None:
        """All is read: remove the files, so that no student's code can read the hidden cells from them."""
        for path in self._jobs:
            Path(path).unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: IPyNbCell, call: pytest.CallInfo) -> Generator[None, Any, Any]:
        failed_setup = call.when == "setup" and call.excinfo is not None
        if call.when == "call" or failed_setup:
            self._cells[str(item.path)].append(cell_result(item, call, failed_setup))
        return (yield)


def cell_result(item: IPyNbCell, call: pytest.CallInfo, failed_setup: bool) -> dict[str, Any]:
    """{"id", "status": ok | error | timeout | stuck | overtime | died |
    flood | not_run | skipped, "ename", "evalue", "text"}."""
    kernel: GradingKernel | None = item.parent.kernel
    outputs = item.test_outputs or []
    error: dict[str, str] = next((output for output in outputs if output["output_type"] == "error"), {})
    text = "".join(str(output.get("text", "")) for output in outputs if output["output_type"] == "stream")
    result = {
        "id": item.cell.metadata.get("nbgrader", {}).get("grade_id") or item.cell.get("id") or item.name,
        "status": "ok",
        "ename": str(error.get("ename", "")),
        "evalue": _ESCAPES.sub("", str(error.get("evalue", "")))[:_MAX_TEXT],
        "text": _ESCAPES.sub("", text)[-_MAX_TEXT:],
        "seconds": round(call.duration, 3),
    }
    excinfo = call.excinfo
    if failed_setup or kernel is None or (excinfo and "Kernel dead on test start" in str(excinfo.value)):
        result["status"] = "not_run"
    elif excinfo is not None and excinfo.errisinstance(pytest.skip.Exception):
        result["status"] = "skipped"
    elif excinfo is not None:
        result["status"] = kernel.verdict or "error"
        result["evalue"] = result["evalue"] or str(excinfo.value)[:2000]
    elif kernel.verdict and not item.options["check_exception"]:
        result |= {"status": "error", "ename": "Silenced", "evalue": "the cell raised an error and hid its traceback"}
    return result


def main() -> int:
    jobs_file, fd = Path(sys.argv[1]), int(sys.argv[2])
    work = json.loads(jobs_file.read_text("utf-8"))
    plugin = WorkerPlugin(work["jobs"], Limits.from_dict(work["limits"]), fd, jobs_file.parent)
    ini = jobs_file.with_suffix(".ini")
    ini.write_text("[pytest]\n", "utf-8")
    options = [
        "-q",
        "--color=no",
        "--noconftest",
        "-p",
        "nbval.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
    ]
    options += [
        "-c",
        str(ini),
        "--rootdir",
        str(jobs_file.parent),
        f"--nbval-cell-timeout={plugin.limits.cell_seconds}",
    ]
    pytest.main([*options, *(job["notebook"] for job in work["jobs"])], plugins=[plugin])
    return 0


if __name__ == "__main__":
    sys.exit(main())
