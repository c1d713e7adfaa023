"""A client of OpenAI-compatible servers that reads completions as streams and notes when each chunk came.

Only the standard library, and nothing of this repository: it runs wherever a server can be reached.
"""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


class BenchError(Exception):
    """One line: what is wrong, and what to do."""


@dataclass
class Sample:
    """One answer: seconds from sending to the first token and to the end, gaps between chunks, tokens as counted by
    the server."""

    ttft: float = math.nan
    latency: float = math.nan
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


class Client:
    """One server. Each call is a connection of its own."""

    def __init__(self, base_url: str, timeout: float):
        parts = urllib.parse.urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme != "http" or not parts.hostname:
            raise BenchError(f"{base_url!r} is no http:// address")
        self.base_url, self._host, self._port = base_url, parts.hostname, parts.port or 80
        self._path, self._timeout = parts.path.rstrip("/").removesuffix("/v1"), timeout

    def get(self, path: str) -> str:
        connection, response = self._request("GET", path, None)
        try:
            return response.read().decode()
        finally:
            connection.close()

    def complete(self, body: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> Sample:
        """Send a prompt and read the stream to its end."""
        start = clock()
        connection, response = self._request("POST", "/v1/completions", json.dumps(body).encode())
        try:
            return read_stream(response, start, clock)
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise BenchError(f"{self.base_url} broke off an answer: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def model(self) -> str:
        """The first model it serves."""
        try:
            return str(json.loads(self.get("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise BenchError(f"{self.base_url} is there, but /v1/models is not what an OpenAI server says") from None

    def counter(self, name: str) -> float | None:
        """The sum of a counter of /metrics over its labels; None where the server has none."""
        try:
            lines = [line.split() for line in self.get("/metrics").splitlines() if line.startswith(name + "{")]
        except BenchError:
            return None
        return sum(float(line[-1]) for line in lines) if lines else None

    def _request(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise BenchError(
                f"no server answers at {self.base_url} ({error or type(error).__name__}). Start one, for example: "
                f"mini-engine serve --port {self._port}"
            ) from None
        if response.status != 200:
            text = response.read().decode(errors="replace")
            connection.close()
            raise BenchError(f"{self.base_url}{path} says {response.status}: {_message(text)}")
        return connection, response


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


def read_stream(lines: Iterable[bytes], start: float, clock: Callable[[], float]) -> Sample:
    """A sample from the lines of an event stream. A chunk without a choice carries no token, and has no time."""
    sample, last = Sample(), math.nan
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise BenchError(f"the server broke off an answer: {_message(data.decode())}")
        if event.get("usage"):
            sample.prompt_tokens = event["usage"]["prompt_tokens"]
            sample.output_tokens = event["usage"]["completion_tokens"]
        if not event.get("choices"):
            continue
        now = clock()
        if math.isnan(last):
            sample.ttft = now - start
        else:
            sample.gaps.append(now - last)
        last = now
        sample.latency = now - start
    else:
        raise BenchError("the server ended an answer without [DONE]")
    if not sample.output_tokens or math.isnan(sample.ttft):
        raise BenchError("the server sent no tokens, or no usage at the end of the stream")
    return sample


def run_level(client: Client, bodies: Sequence[dict[str, Any]], concurrency: int) -> tuple[list[Sample], float]:
    """Answer all bodies with so many clients at a time. Samples, and the seconds it took. Raises the first error."""
    waiting, samples, errors = iter(bodies), list[Sample](), list[BaseException]()
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                body = next(waiting, None)
            if body is None:
                return
            try:
                samples.append(client.complete(body))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return samples, seconds
