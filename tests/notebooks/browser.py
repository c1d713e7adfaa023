"""A headless Chromium driven over the DevTools protocol, and a JupyterLab for it to open.

Source: Chrome DevTools Protocol, domains Page, Runtime and Input; one JSON message a command over a WebSocket.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 300.0  # seconds for anything: a test machine may be slow and busy


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab."""

    def __init__(self, websocket: Any):
        self._socket = websocket
        self._count = 0

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come in between are dropped."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises RuntimeError where it throws."""
        answer = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Evaluate until it is true; the value."""
        return wait_until(lambda: self.evaluate(expression), expression)

    def drag(self, x: float, y: float, by: float) -> None:
        """Press the mouse at (x, y), move it `by` pixels to the right, let go."""
        mouse = {"button": "left", "buttons": 1, "clickCount": 1}
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.command("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
        for step in range(1, 6):
            self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x + by * step / 5, y=y, **mouse)
        self.command("Input.dispatchMouseEvent", type="mouseReleased", x=x + by, y=y, **(mouse | {"buttons": 0}))


def wait_until(ready: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if value := ready():
            return value
        time.sleep(0.2)
    raise TimeoutError(f"not so after {PATIENCE:g} s: {what}")


@contextmanager
def chromium(home: Path) -> Iterator[Page]:
    """A fresh browser with one tab. home: an empty folder for its profile."""
    import websocket

    program = find_chromium()
    assert program is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1400,1000"]
    options += ["--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"]
    with running([program, *options], os.environ | {"HOME": str(home)}, home / "chromium.log"):
        port_file = home / "DevToolsActivePort"
        wait_until(port_file.exists, "Chromium listens")
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        connection = websocket.create_connection(
            page["webSocketDebuggerUrl"], timeout=PATIENCE, suppress_origin=True, max_size=None
        )
        tab = Page(connection)
        tab.command("Emulation.setFocusEmulationEnabled", enabled=True)  # nobody clicks on a window without a screen
        try:
            yield tab
        finally:
            connection.close()


@contextmanager
def jupyterlab(directory: Path, home: Path, python_path: Path) -> Iterator[str]:
    """A JupyterLab over `directory`, with settings of its own under `home`; yields its address with a token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {name: str(home / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {name: str(home / name.lower()) for name in ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")}
    options = ["--no-browser", "--allow-root", f"--ServerApp.root_dir={directory}", f"--ServerApp.port={port}"]
    options += ["--IdentityProvider.token=of-this-test", "--ServerApp.port_retries=0", "--expose-app-in-browser"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with running(command, os.environ | own | {"PYTHONPATH": str(python_path)}, home / "jupyterlab.log"):
        address = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(f"{address}/api?token=of-this-test"), "JupyterLab answers")
        yield f"{address}/lab/tree/{{}}?token=of-this-test"


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A process for the duration; what it printed is in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
