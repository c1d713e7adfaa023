"""A server in a process of its own and a client that measures it, for a notebook (lab 10-1).

with served(["--model", directory]) as url:
    print(client(url, "--concurrency", "1", "4"))
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "labs" / "bench_client.py"
PATIENCE_S, ENDING_S = 300, 30


@contextmanager
def served(options: Sequence[str]) -> Iterator[str]:
    """`mini-engine serve` with these options on any free port; its address, once it answers. Ends with the block.

    Raises RuntimeError with the server's last words when it does not start.
    """
    command = [sys.executable, "-m", "mini_engine", "serve", "--port", "0", *options]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as errors:
            server = subprocess.Popen(command, stdout=errors, stderr=errors, cwd=ROOT)
        try:
            yield _address(server, log)
        finally:
            server.terminate()
            try:
                server.wait(ENDING_S)
            finally:
                server.kill()
                server.wait()


def client(base_url: str, *options: str) -> str:
    """What labs/bench_client.py prints of a server. Raises RuntimeError with its message when it cannot measure."""
    command = [sys.executable, str(CLIENT), "--base-url", base_url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"the client ended with status {done.returncode}")
    return done.stdout


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """What the server announces when it is ready."""
    deadline = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        if found := re.search(r" on (http://[^ ]+) ", log.read_text()):
            return found.group(1)
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text().strip()[-800:]}")
