"""Runs many notebooks, each in a kernel under limits, a few at a time.

The notebooks go in batches to worker processes (worker.py: one pytest run with nbval each). A worker that breaks or
hangs costs the notebook it was at, and the rest of its batch goes to a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import nbformat

from coursekit.kernel import Limits

_BATCH = 25  # pytest with nbval starts in about 2 s: a small part of 25 notebooks, and few enough to share out evenly


@dataclass(frozen=True)
class CellRun:
    """What became of one code cell; `status` as worker.cell_result lists it, and "not_run"."""

    id: str
    status: str
    ename: str = ""
    evalue: str = ""
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NotebookRun:
    """All cells of a notebook that ran. fate: what ended the kernel early (kernel.py), "crashed" for the worker."""

    key: str
    cells: dict[str, CellRun] = field(default_factory=dict)
    fate: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """key: the caller's own. cwd: None is an empty directory that exists only for this run."""

    key: str
    notebook: nbformat.NotebookNode
    cwd: Path | None = None


def run_notebooks(jobs: Iterable[Job], limits: Limits, workers: int = 1) -> Iterator[NotebookRun]:
    """Run each notebook in a kernel of its own and yield the results as they come.

    Closing the iterator early (an interrupt, say) ends every process it started.
    """
    waiting = list(jobs)
    size = max(1, min(_BATCH, -(-len(waiting) // max(workers, 1))))
    batches: Queue[list[Job]] = Queue()
    for first in range(0, len(waiting), size):
        batches.put(waiting[first : first + size])
    results: Queue[NotebookRun | BaseException] = Queue()
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as work:
        arguments = (batches, results, limits, Path(work), stop)
        threads = [threading.Thread(target=_serve, args=arguments, daemon=True) for _ in range(max(workers, 1))]
        for thread in threads:
            thread.start()
        try:
            for _ in waiting:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def _serve(
    batches: Queue[list[Job]],
    results: Queue[NotebookRun | BaseException],
    limits: Limits,
    work: Path,
    stop: threading.Event,
) -> None:
    try:
        while not stop.is_set() and not batches.empty():
            with contextlib.suppress(Exception):
                rest = batches.get_nowait()
                while rest and not stop.is_set():
                    rest = _Batch(rest, limits, work, stop).run(results)
    except BaseException as error:  # a thread's own failure must reach the caller, not vanish
        results.put(error)


class _Batch:
    """One worker process and the notebooks it was given."""

    def __init__(self, jobs: list[Job], limits: Limits, work: Path, stop: threading.Event) -> None:
        self._jobs = {job.key: job for job in jobs}
        self._limits = limits
        self._stop = stop
        self._directory = Path(tempfile.mkdtemp(dir=work))
        self._silence = limits.startup_seconds + limits.notebook_seconds + limits.cell_seconds + 30

    def run(self, results: Queue[NotebookRun | BaseException]) -> list[Job]:
        """Put a result for each notebook that was done; return those that a worker's end left over."""
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "coursekit.worker", str(self._write()), str(writer)]
        root = str(Path(__file__).resolve().parent.parent)
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=self._directory, env=env, stdin=null, stdout=null, stderr=null, pass_fds=[writer],
            start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        running: str | None = None
        try:
            for event in self._events(reader):
                running = event["key"] if event["event"] == "start" else None
                if event["event"] == "done":
                    job = self._jobs.pop(event["key"])
                    results.put(_result(job.key, event))
        finally:
            os.close(reader)
            _end(process)
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._jobs and not self._stop.is_set():
            # Nothing said which notebook it was at: then it is the first, so that every round gets shorter.
            broken = self._jobs.pop(running or next(iter(self._jobs)))
            results.put(NotebookRun(broken.key, fate="crashed"))
        return list(self._jobs.values())

    def _write(self) -> Path:
        """The notebooks lie beside the directories they run in, not inside."""
        work = []
        for index, job in enumerate(self._jobs.values()):
            notebook = self._directory / f"{index}.ipynb"
            notebook.write_text(nbformat.writes(job.notebook), "utf-8")
            cwd = job.cwd or Path(tempfile.mkdtemp(prefix="course-cwd-", dir=self._directory))
            work.append({"key": job.key, "notebook": str(notebook), "cwd": str(cwd)})
        path = self._directory / "jobs.json"
        path.write_text(json.dumps({"jobs": work, "limits": dataclasses.asdict(self._limits)}), "utf-8")
        return path

    def _events(self, reader: int) -> Iterator[dict[str, Any]]:
        """The worker's lines, until it ends, is stopped, or is silent for longer than any notebook may take."""
        pending = b""
        heard = time.monotonic()
        while not self._stop.is_set() and time.monotonic() - heard < self._silence:
            if not select.select([reader], [], [], 0.1)[0]:
                continue
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return
            heard = time.monotonic()
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines)


def _result(key: str, event: dict[str, Any]) -> NotebookRun:
    cells = {cell["id"]: CellRun(**cell) for cell in event["cells"]}
    return NotebookRun(key, cells, event["fate"], event["seconds"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a finished worker go, and end one that is not; its kernels follow their parent (kernel_main.py)."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
