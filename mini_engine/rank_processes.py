"""Starts a process a rank, talks to all of them, and sees to it that none is left.

    driver ── socket ── rank 0      A process that ends closes its socket: whoever waits for an answer, or for work,
           ── socket ── rank 1      reads the end of file at once. That is how each learns of the other's death.

The driver starts `python -m mini_engine.rank_worker`, not a copy of itself, so that a script needs no
`if __name__ == "__main__"` and a notebook works. The ranks meet at a file, so no port can be taken.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

from mini_engine.groups import GroupError
from mini_engine.rank_messages import Answer, pack, unpack

CULPRIT_S = 2.0  # a rank that lost a peer may be heard of before the peer itself is
ENDING_S = 3.0  # from end of file to exit; then it is killed
LOG_TAIL = 4096  # bytes


class Failure(NamedTuple):
    """What became of a rank. error: what it raised, None where its process ended."""

    rank: int
    error: Exception | None
    text: str

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end is the likely cause."""
        return isinstance(self.error, GroupError)


class RanksFailed(GroupError):
    """The first rank to fail, in one line. failure: what it was."""

    def __init__(self, failure: Failure):
        super().__init__(f"rank {failure.rank} {failure.text}")
        self.failure = failure


class RankProcesses:
    """The processes, in rank order. They end with this object, at the latest with the interpreter.

    environment: variables that differ from this process's. descriptors: open files that the processes inherit.
    """

    def __init__(self, size: int, environment: dict[str, str], descriptors: Sequence[int] = ()):
        self.directory = Path(tempfile.mkdtemp(prefix="mini-engine-"))
        self.pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115 (_end closes them)
        # Not a method: that would keep this object alive.
        self.end: Callable[[], None] = weakref.finalize(
            self, _end, os.getpid(), self.pipes, self.processes, self.logs, self.directory
        )
        for rank in range(size):
            self._start(rank, environment, descriptors)

    def _start(self, rank: int, environment: dict[str, str], descriptors: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.pipes.append(Connection(ours.detach()))
            # A session of its own: Ctrl-C goes to the driver alone. -P: the current directory is not searched first.
            command = [sys.executable, "-P", "-m", "mini_engine.rank_worker", str(theirs.fileno())]
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stderr=self.logs[rank],
                    pass_fds=[theirs.fileno(), *descriptors],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
                )
            )

    def send(self, *messages: Any) -> None:
        """One message for all ranks, or one for each. Who is not there any more is found out by `answers`."""
        packed = [pack(message) for message in messages]
        for rank, pipe in enumerate(self.pipes):
            with contextlib.suppress(OSError):
                pipe.send_bytes(packed[rank % len(packed)])

    def answers(self) -> list[Any]:
        """What each rank answers to the last message, in rank order. Raises RanksFailed; then all have been ended."""
        values: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline: float | None = None
        while len(values) + len(failures) < len(self.pipes):
            heard = values.keys() | {failure.rank for failure in failures}
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in heard}
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                found = self._receive(rank)
                if isinstance(found, Failure):
                    failures.append(found)
                else:
                    values[rank] = found
            if failures:
                deadline = deadline or time.monotonic() + CULPRIT_S
                if not ready or not all(failure.is_consequence for failure in failures):
                    break
        if failures:
            self.end()
            raise RanksFailed(next((each for each in failures if not each.is_consequence), failures[0]))
        return [values[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            answer: Answer = unpack(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return Failure(rank, None, self._how_it_ended(rank))
        if answer.error is None:
            return answer.value
        text = " ".join(str(answer.error).split())
        return Failure(rank, answer.error, f"failed: {type(answer.error).__name__}: {text}")

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        try:
            code = process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return f"(process {process.pid}) closed its socket and went on"
        how = f"ended with status {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        last = self._last_line(rank)
        return f"(process {process.pid}) {how}" + (f"; the last it wrote: {last}" if last else "")

    def _last_line(self, rank: int) -> str:
        log = self.logs[rank].fileno()
        tail = os.pread(log, LOG_TAIL, max(0, os.fstat(log).st_size - LOG_TAIL))
        lines = tail.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _end(
    owner: int,
    pipes: list[Connection],
    processes: list[subprocess.Popen[bytes]],
    logs: Sequence[IO[bytes]],
    directory: Path,
) -> None:
    """Let each rank read the end of file, kill who does not go, and leave nothing behind."""
    if os.getpid() != owner:  # a fork of the driver ends; the ranks are not its own
        return
    for pipe in pipes:  # not closed yet: another thread may be reading, and then reads the end of file as well
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + ENDING_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in pipes:
        pipe.close()
    for log in logs:
        log.close()
    shutil.rmtree(directory, ignore_errors=True)
