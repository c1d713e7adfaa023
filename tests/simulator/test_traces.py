"""Trace readers: what the formats mean, and what is said of lines that break them."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mini_engine.analysis import BOOK_STEP
from mini_engine.simulator import simulate
from mini_engine.simulator.traces import TraceError, load_agent_sessions, load_mooncake, prefix_hit_rate
from mini_engine.simulator.workloads import Request
from tests.simulator.helpers import config

DATA = Path(__file__).resolve().parent.parent / "data" / "traces"


def make_traces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_traces", DATA / "make_traces.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_traces_beside_the_script_are_what_it_makes():
    made = make_traces().traces()
    assert {name: (DATA / name).read_text(encoding="utf-8") for name in made} == made


def row(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [4, 5, 6], **changes}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in rows))
    return path


def test_a_mooncake_line(tmp_path):
    assert load_mooncake(write(tmp_path / "t.jsonl", row())) == [Request("line1", 1.5, 1025, 7, (4, 5, 6), 512)]


def test_mooncake_lines_are_sorted_by_time_and_blank_ones_skipped(tmp_path):
    path = write(tmp_path / "t.jsonl", row(timestamp=9), "", row(timestamp=3), row(timestamp=9))
    assert [request.request_id for request in load_mooncake(path)] == ["line3", "line1", "line4"]


def test_limit_and_block_size(tmp_path):
    path = write(tmp_path / "t.jsonl", row(input_length=33), row(input_length=48), "not even JSON")
    requests = load_mooncake(path, block_size=16, limit=2)
    assert [(request.block_size, request.num_prompt_tokens) for request in requests] == [(16, 33), (16, 48)]


@pytest.mark.parametrize(
    "bad, says",
    [
        (row(hash_ids=[4, 5]), "2 hash_ids for 1025 tokens, expected ceil(1025 / 512) = 3"),
        (row(input_length=1024), "3 hash_ids for 1024 tokens, expected ceil(1024 / 512) = 2"),
        ("{", "not JSON"),
        ("[1]", "expected an object, got list"),
        ({"timestamp": 0}, "input_length must be a whole number"),
        (row(input_length=0, hash_ids=[]), "input_length must be a whole number of at least 1, got 0"),
        (row(input_length=True), "input_length must be a whole number of at least 1, got True"),
        (row(output_length=0), "output_length"),
        (row(output_length=2.5), "output_length"),
        (row(timestamp=-1), "timestamp must be a time of at least 0, got -1"),
        (row(timestamp="1"), "timestamp"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        (row(hash_ids="456"), "hash_ids must be a list"),
        (row(hash_ids=[1, 2, "3"]), "hash_ids must be a list"),
        (row(hash_ids=[1, -2, 3]), "at least 0"),
    ],
)
def test_bad_mooncake_lines_are_named(tmp_path, bad, says):
    path = write(tmp_path / "t.jsonl", row(), "", bad, row())
    with pytest.raises(TraceError) as error:
        load_mooncake(path)
    (problem,) = error.value.problems
    assert problem.startswith("line 3: ") and says in problem
    assert str(error.value).startswith("t.jsonl: line 3: ") and "\n" not in str(error.value)


def test_every_bad_line_is_listed_and_some_are_shown(tmp_path):
    path = write(tmp_path / "t.jsonl", *[row(), row(output_length=0)] * 8)
    with pytest.raises(TraceError, match="and 3 more$") as error:
        load_mooncake(path)
    assert [problem.split(":")[0] for problem in error.value.problems] == [f"line {i}" for i in range(2, 17, 2)]


def test_an_empty_trace_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="no requests"):
        load_mooncake(write(tmp_path / "t.jsonl"))


def session(*requests: Any, **changes: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **changes}


def turn(t: float, length: int, *ids: int, **changes: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": length, "out": 5, "hash_ids": list(ids), **changes}


def load(tmp_path: Path, *sessions: Any, **options: Any) -> list[Request]:
    paths = [write(tmp_path / f"{i}.json", item) for i, item in enumerate(sessions)]
    return load_agent_sessions(paths, **options)


def sharing(requests: list[Request]) -> list[list[str]]:
    """Which requests hold each id, whatever the ids are."""
    holders: dict[int, list[str]] = {}
    for request in requests:
        for block_id in request.block_ids:
            holders.setdefault(block_id, []).append(request.request_id)
    return sorted(holders.values())


def test_an_agent_session_has_ids_for_full_blocks_only(tmp_path):
    first, second = load(tmp_path, session(turn(0, 63), turn(2.5, 130, 1, 2)))
    assert (first.request_id, first.block_ids, first.num_known_tokens) == ("s/0", (), 0)
    assert (second.arrival, second.num_known_tokens, second.block_size) == (2.5, 128, 64)


def test_equal_ids_of_two_sessions_mean_nothing(tmp_path):
    a = session(turn(0, 128, 1, 2), turn(1, 192, 1, 2, 3), id="a")
    b = session(turn(0, 64, 1), id="b")
    requests = load(tmp_path, a, b, session_gap=10.0)
    assert [request.arrival for request in requests] == [0, 1, 10]
    assert sharing(requests) == [["a/0", "a/1"], ["a/0", "a/1"], ["a/1"], ["b/0"]]


def test_global_ids_stay_as_they_are_and_apart_from_local_ones(tmp_path):
    shared = session(turn(0, 64, 1), id="a", hash_id_scope="global")
    other = session(turn(0, 64, 1), id="b", hash_id_scope="global")
    requests = load(tmp_path, session(turn(0, 128, 1, 2), id="c"), shared, other)
    assert sharing(requests) == [["a/0", "b/0"], ["c/0"], ["c/0"]]
    assert {request.block_ids for request in requests if request.request_id != "c/0"} == {(1,)}


def test_a_subagent_starts_empty_at_the_time_it_was_spawned(tmp_path):
    helper = {"t": 5.0, "type": "subagent", "requests": [turn(0, 64, 1), turn(1.5, 128, 1, 2)]}
    requests = load(tmp_path, session(turn(0, 64, 1), helper, turn(20, 64, 1)))
    assert [(request.request_id, request.arrival) for request in requests] == [
        ("s/0", 0),
        ("s/1.0", 5.0),
        ("s/1.1", 6.5),
        ("s/2", 20),
    ]
    assert sharing(requests) == [["s/0", "s/2"], ["s/1.0", "s/1.1"], ["s/1.1"]]


@pytest.mark.parametrize(
    "bad, says",
    [
        (session(turn(0, 64, 1), turn(1, 130, 1, 2, 3)), "request s/1: 3 hash_ids for 130 tokens, expected floor"),
        (session(turn(0, 128, 1)), "request s/0: 1 hash_ids for 128 tokens"),
        (session(turn(-1, 64, 1)), "request s/0: t must be"),
        (session(turn(0, 64, 1, out=0)), "request s/0: out must be"),
        (session("x"), "request s/0: expected an object"),
        (session({"t": 0, "type": "subagent", "requests": [turn(0, 64)]}), "request s/0.0: 0 hash_ids"),
        (session({"t": 0, "type": "subagent"}), "request s/0: s/0: requests must be a list"),
        (session(block_size=0), "block_size"),
        (session(hash_id_scope="file"), "hash_id_scope"),
        ({"block_size": 64}, "requests must be a list"),
        ("[]", "expected an object, got list"),
        ("{", "not JSON"),
        (session(), "no requests"),
    ],
)
def test_bad_sessions_are_named(tmp_path, bad, says):
    with pytest.raises(TraceError) as error:
        load(tmp_path, bad)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_directory_of_sessions(tmp_path):
    assert {request.request_id.split("/")[0] for request in load_agent_sessions(DATA)} == {"session_a", "session_b"}
    with pytest.raises(TraceError, match="no .json files"):
        load_agent_sessions(tmp_path)
    with pytest.raises(OSError):
        load_agent_sessions(tmp_path / "missing")


def test_the_hit_rate_of_an_lru_cache_by_hand():
    requests = [Request(f"r{i}", i, 16 * len(ids), 1, ids, 16) for i, ids in enumerate([(1, 2), (1, 3), (4,), (1, 2)])]
    assert prefix_hit_rate(requests) == 3 / 7  # 1 of (1, 3), both of the last
    assert prefix_hit_rate(requests, 3) == 2 / 7  # {2, 1, 3}, then 4 drives 2 out: of the last only 1 is left
    assert prefix_hit_rate(requests, 1) == 0
    assert prefix_hit_rate([Request("a", 0, 1, 1)]) == 0


def test_only_a_prefix_counts_as_a_hit():
    requests = [Request(f"r{i}", i, 32, 1, ids, 16) for i, ids in enumerate([(1, 2), (3, 2)])]
    assert prefix_hit_rate(requests) == 0


@pytest.mark.parametrize("block_size", [512, 64])
def test_the_scheduler_finds_what_the_ids_promise(block_size):
    """With room for everything, and requests far apart, the hits are those of the ids, in full blocks."""
    requests = load_mooncake(DATA / "chat.jsonl")
    apart = [Request(r.request_id, i * 100.0, r.num_prompt_tokens, 1, r.block_ids, 512) for i, r in enumerate(requests)]
    timeline = simulate(apart, config(enable_prefix_caching=True, block_size=block_size, num_blocks=8_000), BOOK_STEP)
    seen: set[int] = set()
    for record, request in zip(timeline.requests, apart, strict=True):
        found = 0
        while found < len(request.block_ids) and request.block_ids[found] in seen:
            found += 1
        seen.update(request.block_ids)
        tokens = min(found * 512, request.num_prompt_tokens - 1)
        assert record.metrics.num_cached_tokens == tokens // block_size * block_size


REAL = Path(os.environ.get("REAL_TRACES", "not-set"))
"""A directory with mooncake_conversation_trace.jsonl and mooncake_synthetic_trace.jsonl, where somebody has them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, num_requests, blocks, rates",
    [
        ("conversation", 12_031, (1_000, 5_000, 20_000, 50_000, None), (0.0445, 0.1104, 0.2875, 0.3546, 0.3664)),
        ("synthetic", 3_993, (None,), (0.640,)),
    ],
)
def test_hit_rates_of_the_real_traces(name, num_requests, blocks, rates):
    path = REAL / f"mooncake_{name}_trace.jsonl"
    if not path.is_file():
        pytest.skip("REAL_TRACES names no directory with the Mooncake traces (traces.py says where they are published)")
    requests = load_mooncake(path)
    assert len(requests) == num_requests
    assert [prefix_hit_rate(requests, n) for n in blocks] == pytest.approx(rates, abs=0.0005)
