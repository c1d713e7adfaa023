"""A kernel under limits, spoken to the way nbval does. `start_process` is the one place a kernel is started.

nbval's own kernel notices a death only when the cell's time is over, reads what is printed only afterwards, and knows
no limit for the notebook. This one watches process, output and both clocks while it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import zmq
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.connect import write_connection_file

_POLL_MS = 100
_GRACE_SECONDS = 10.0  # for a cell to react to the interrupt that ends its time
_HEARING_SECONDS = 0.5
_KEPT = ("PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "MPLCONFIGDIR")


@dataclass(frozen=True)
class Limits:
    """What one notebook may use. Times are wall-clock seconds; output beyond `kept_bytes` a cell is dropped, and a
    kernel that prints more than `output_bytes` in one cell is ended."""

    cell_seconds: float = 30.0
    notebook_seconds: float = 120.0
    startup_seconds: float = 60.0
    memory_bytes: int = 4 << 30
    file_bytes: int = 64 << 20
    kept_bytes: int = 100_000
    output_bytes: int = 20_000_000

    def for_process(self) -> str:
        """The part the process itself is held to, as JSON. CPU time is a second line behind the clock, so generous."""
        cpu = int(4 * (self.notebook_seconds + self.startup_seconds)) + 10
        limits = {"memory_bytes": self.memory_bytes, "file_bytes": self.file_bytes, "cpu_seconds": cpu}
        return json.dumps(limits)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Limits:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def start_process(connection_file: Path, cwd: Path, private: Path, limits: Limits) -> subprocess.Popen[bytes]:
    """Start a kernel's process, in a session (so a process group) of its own. All isolation belongs here.

    cwd: where the notebook's relative paths lead. private: a directory of its own, for IPython's profile.
    The environment holds the few variables Python needs and no secret the grader may have been given.
    """
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "IPYTHONDIR": str(private),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    # -P: a json.py beside the notebook must not replace the library while the kernel starts.
    command = [sys.executable, "-P", "-m", "coursekit.kernel_main", str(connection_file), limits.for_process()]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=null, stdout=null, stderr=null, start_new_session=True)


class GradingKernel:
    """What nbval asks of a kernel (its RunningKernel's methods), under Limits.

    scratch: where the kernel's own files go; whoever made that directory removes it, should this process be killed.

    verdict: of the cell run last: None, "error" (even where the code silenced its traceback), "timeout", or a fate.
    fate: what ended the kernel: None, "died", "stuck" (deaf to an interrupt), "overtime" (the notebook's) or "flood".
    """

    def __init__(self, cwd: Path, limits: Limits, scratch: Path) -> None:
        self.limits = limits
        self.verdict: str | None = None
        self.fate: str | None = None
        self._messages: deque[dict[str, Any]] = deque()
        self._printed = 0
        # Sockets are files here (no ports to run out of, or to be reached from elsewhere), so their path must be short.
        self._private = Path(tempfile.mkdtemp(prefix="k", dir=scratch))
        connection_file, _ = write_connection_file(
            str(self._private / "c.json"), transport="ipc", ip=str(self._private / "s"), shell_port=1, iopub_port=2,
            stdin_port=3, hb_port=4, control_port=5,
        )  # fmt: skip
        self._process = start_process(Path(connection_file), cwd, self._private, limits)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.MAXMSGSIZE, 2 * limits.output_bytes)
        self.kc = BlockingKernelClient(context=self._context)
        self.kc.load_connection_file(connection_file)
        self._deadline = self._cell_deadline = time.monotonic() + limits.startup_seconds
        self._ready = self._stopped = False

    def wait_ready(self) -> None:
        """Wait for the kernel's first answer; the notebook's clock starts here. Raises RuntimeError if none comes."""
        if self._ready:
            return
        self.kc.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=False)
        until = time.monotonic() + self.limits.startup_seconds
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(Empty):
                request = self.kc.kernel_info()
                self.await_reply(request, timeout=2)
                if not self._hears(request):
                    continue
                self._messages.clear()
                self._ready = True
                self._deadline = time.monotonic() + self.limits.notebook_seconds
                return
        self.stop()
        raise RuntimeError("the kernel did not start")

    def _hears(self, request: str) -> bool:
        """Whether the outputs of `request` arrive. Their channel connects in its own time, which may be after the
        first answer on the other one, and what is printed before that is lost: a cell would never seem to end."""
        until = time.monotonic() + _HEARING_SECONDS
        while not any(message["parent_header"].get("msg_id") == request for message in self._messages):
            if time.monotonic() >= until:
                return False
            self.kc.iopub_channel.socket.poll(_POLL_MS)  # type: ignore[union-attr]
            self._drain()
        return True

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> str:
        self._messages.clear()
        self._printed = 0
        self.verdict = None
        return self.kc.execute(cell_input, store_history=False, allow_stdin=False, stop_on_error=False)

    def await_reply(self, msg_id: str, timeout: float) -> None:
        """Until the cell is answered. Raises Empty when its time is over, RuntimeError when the kernel has ended."""
        self._cell_deadline = time.monotonic() + timeout
        poller = zmq.Poller()
        shell, iopub = self.kc.shell_channel, self.kc.iopub_channel
        for channel in (shell, iopub):
            poller.register(channel.socket, zmq.POLLIN)  # type: ignore[union-attr]
        while True:
            ready = dict(poller.poll(_POLL_MS))
            self._drain()
            if shell.socket in ready:  # type: ignore[union-attr]
                reply = shell.get_msg(timeout=0)
                if reply["parent_header"].get("msg_id") == msg_id:
                    self.verdict = "error" if reply["content"].get("status") == "error" else None
                    return
            self._watch(idle=not ready)
            if time.monotonic() >= self._cell_deadline:
                self.verdict = "timeout"
                raise Empty

    def get_message(self, stream: str, timeout: float | None = None) -> dict[str, Any]:
        """The next output message. A kernel that is gone has none: RuntimeError at once rather than after `timeout`."""
        until = time.monotonic() + (timeout or 0)
        while not self._messages:
            arrived = self.kc.iopub_channel.socket.poll(_POLL_MS)  # type: ignore[union-attr]
            self._drain()
            self._watch(idle=not arrived)
            if not self._messages and time.monotonic() >= until:
                # nbval now stops the kernel. It was deaf to the interrupt, or a message over the size cap was dropped
                # and with it the end of the cell.
                self.fate = "stuck" if self.verdict == "timeout" else "flood"
                self.verdict = self.verdict or self.fate
                raise Empty
        return self._messages.popleft()

    def await_idle(self, parent_id: str, timeout: float) -> None:
        while True:
            message = self.get_message("iopub", timeout)
            idle = message["content"].get("execution_state") == "idle"
            if idle and message["parent_header"].get("msg_id") == parent_id:
                return

    def _drain(self) -> None:
        """Take over what has been printed; beyond the cap only the messages that say where a cell stands are kept."""
        channel = self.kc.iopub_channel
        for _ in range(1000):
            if not channel.msg_ready():
                return
            message = channel.get_msg(timeout=0)
            content = message["content"]
            self._printed += _size(content)
            structural = message["msg_type"] in ("status", "error")
            if structural or self._printed <= self.limits.kept_bytes:
                self._messages.append(message)

    def _watch(self, idle: bool) -> None:
        """End a kernel that is past its limits, and notice one that has ended. idle: there is nothing to be read."""
        now = time.monotonic()
        if idle and self._process.poll() is not None:
            self._end("died")
        if self._printed > self.limits.output_bytes:
            self._end("flood")
        if now >= self._deadline:
            self._end("overtime")
        if now >= self._cell_deadline + _GRACE_SECONDS:
            self._end("stuck")

    def _end(self, fate: str) -> None:
        self.fate = self.verdict = fate
        self._kill()
        raise RuntimeError(f"the kernel has ended: {fate}")

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _kill(self) -> None:
        """End the whole process group: what a cell started goes with the kernel."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._kill()
        if self._ready:
            self.kc.stop_channels()
        self._context.destroy(linger=0)
        shutil.rmtree(self._private, ignore_errors=True)


def _size(content: dict[str, Any]) -> int:
    """About how many bytes a message carries; none is free, or a flood of empty ones would be."""
    parts = [content.get("text", ""), content.get("evalue", ""), *dict(content.get("data") or {}).values()]
    return 100 + sum(len(part if isinstance(part, str) else repr(part)) for part in parts)
