"""Requests of real services, read from their published traces.

    Mooncake    one JSON object a line: timestamp (ms), input_length, output_length (tokens), hash_ids: one id for every
                512 tokens of the prompt, the last block partly filled. Ids hold for the whole file.
    Agent       one JSON file a session: requests with t (s), in, out (tokens), hash_ids: one id for every full
                block_size tokens, so up to block_size - 1 tokens have none. Ids are the session's own unless
                hash_id_scope is "global"; a request of type "subagent" holds requests of its own.

Sources: github.com/kvcache-ai/Mooncake (FAST25-release/traces), github.com/callanjfox/kv-cache-tester (traces), both
Apache-2.0. Hand-made traces often break the rule between lengths and ids, so it is checked on every line.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from mini_engine.errors import EngineError
from mini_engine.simulator.workloads import Request

MOONCAKE_BLOCK_SIZE = 512
_SHOWN = 5


class TraceError(EngineError):
    """A trace that breaks its format. problems: every one, each naming its line or request."""

    def __init__(self, path: Path, problems: list[str]):
        self.problems = problems
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        super().__init__(f"{path.name}: {shown}{more}")


def load_mooncake(path: str | Path, block_size: int = MOONCAKE_BLOCK_SIZE, limit: int | None = None) -> list[Request]:
    """The requests of a Mooncake trace, in order of arrival, named by line: "line1", …

    block_size: prompt tokens an id stands for. limit: read that many requests at most.
    Raises TraceError listing every bad line by its number, and OSError for a file that cannot be read.
    """
    path = Path(path)
    requests: list[Request] = []
    problems: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if limit is not None and len(requests) >= limit:
                break
            if line.isspace():
                continue
            try:
                requests.append(_mooncake_request(_json_object(line), number, block_size))
            except _Bad as bad:
                problems.append(f"line {number}: {bad}")
    if problems or not requests:
        raise TraceError(path, problems or ["no requests in it"])
    return sorted(requests, key=lambda request: request.arrival)


def load_agent_sessions(paths: Iterable[str | Path] | str | Path, session_gap: float = 0.0) -> list[Request]:
    """The requests of agent sessions, in order of arrival, named "session/number" ("session/number.number" inside a
    sub-agent).

    paths: session files, or a directory of them. session_gap: seconds from the start of one session to the next.
    Requests arrive when the trace says, even if the simulated server has not answered the one before.
    Raises TraceError naming every bad request of a file, and OSError for a file that cannot be read.
    """
    requests: list[Request] = []
    fresh = count(-1, -1)
    for i, path in enumerate(_session_files(paths)):
        try:
            session = _json_object(path.read_bytes())
            block_size = _whole(session, "block_size", 1)
            scope = session.get("hash_id_scope", "local")
            if scope not in ("local", "global"):
                raise _Bad(f'hash_id_scope is "local" or "global", got {scope!r}')
            reader = _SessionReader(block_size, None if scope == "global" else fresh)
            name = str(session.get("id", path.stem))
            requests += reader.read(session, f"{name}/", i * session_gap)
        except _Bad as bad:
            raise TraceError(path, [str(bad)]) from None
        if reader.problems:
            raise TraceError(path, reader.problems)
    if not requests:
        raise TraceError(Path("agent sessions"), ["no requests in them"])
    return sorted(requests, key=lambda request: request.arrival)


def prefix_hit_rate(requests: Iterable[Request], num_blocks: int | None = None) -> float:
    """Share of all trace blocks found in a cache that keeps the `num_blocks` last used (None: all), one request after
    another. What a cache of that size could give at best if requests did not overlap."""
    cache: dict[int, None] = {}  # in order of last use
    hits = total = 0
    for request in requests:
        total += len(request.block_ids)
        found = 0
        while found < len(request.block_ids) and request.block_ids[found] in cache:
            found += 1
        hits += found
        for block_id in request.block_ids:
            cache.pop(block_id, None)
            cache[block_id] = None
        while num_blocks is not None and len(cache) > num_blocks:
            del cache[next(iter(cache))]
    return hits / total if total else 0.0


class _Bad(Exception):
    """What is wrong with one line or request; its caller knows where that is."""


def _mooncake_request(row: dict[str, Any], number: int, block_size: int) -> Request:
    prompt, output = _whole(row, "input_length", 1), _whole(row, "output_length", 1)
    arrival, ids = _time(row, "timestamp") / 1e3, _hash_ids(row)
    expected = -(-prompt // block_size)
    if len(ids) != expected:
        raise _Bad(f"{len(ids)} hash_ids for {prompt} tokens, expected ceil({prompt} / {block_size}) = {expected}")
    return Request(f"line{number}", arrival, prompt, output, ids, block_size)


class _SessionReader:
    """Reads one session file. fresh: ids that no other conversation has, where the file's own are local."""

    def __init__(self, block_size: int, fresh: Iterator[int] | None):
        self.block_size = block_size
        self.fresh = fresh
        self.problems: list[str] = []

    def read(self, conversation: dict[str, Any], prefix: str, start: float) -> Iterator[Request]:
        """Requests of a session or, nested, of a sub-agent. A sub-agent's times count from when it was spawned, and
        its cache starts empty: with local ids it shares nothing with its parent."""
        rows = conversation.get("requests")
        if not isinstance(rows, list):
            raise _Bad(f"{prefix.rstrip('/.')}: requests must be a list")
        unique: dict[int, int] = {} if self.fresh is None else defaultdict(self.fresh.__next__)
        for number, row in enumerate(rows):
            name = f"{prefix}{number}"
            try:
                if not isinstance(row, dict):
                    raise _Bad(f"expected an object, got {type(row).__name__}")
                arrival = start + _time(row, "t")
                if row.get("type") == "subagent":
                    yield from self.read(row, f"{name}.", arrival)
                    continue
                request = self._request(row, name, arrival)
            except _Bad as bad:
                self.problems.append(f"request {name}: {bad}")
                continue
            if self.fresh is not None:
                request = replace(request, block_ids=tuple(unique[i] for i in request.block_ids))
            yield request

    def _request(self, row: dict[str, Any], name: str, arrival: float) -> Request:
        prompt, output, ids = _whole(row, "in", 1), _whole(row, "out", 1), _hash_ids(row)
        expected = prompt // self.block_size
        if len(ids) != expected:
            raise _Bad(
                f"{len(ids)} hash_ids for {prompt} tokens, expected floor({prompt} / {self.block_size}) = {expected}"
            )
        return Request(name, arrival, prompt, output, ids, self.block_size)


def _session_files(paths: Iterable[str | Path] | str | Path) -> list[Path]:
    if not isinstance(paths, str | Path):
        return [Path(path) for path in paths]
    path = Path(paths)
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise TraceError(path, ["no .json files in it"])
    return found


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Bad(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _Bad(f"expected an object, got {type(value).__name__}")
    return value


def _whole(row: dict[str, Any], name: str, minimum: int) -> int:
    value = row.get(name)
    if type(value) is not int or value < minimum:
        raise _Bad(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return value


def _time(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _Bad(f"{name} must be a time of at least 0, got {value!r}")
    return float(value)


def _hash_ids(row: dict[str, Any]) -> tuple[int, ...]:
    value = row.get("hash_ids")
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise _Bad("hash_ids must be a list of whole numbers of at least 0")
    return tuple(value)
