"""The bench of the block manager measures the work it names. Seconds are not asserted."""

from __future__ import annotations

import json

import pytest

from mini_engine.bench import blocks


def test_a_row_for_each_kind_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "find_spec", lambda name: None)
    rows = list(blocks.figures(repeats=2))
    names = [
        f"{work} per {per}"
        for work in ("hash", "look up", "allocate", "append", "free")
        for per in ("token", "request")
    ]
    assert [row["name"] for row in rows] == names
    assert all(row["value"] > 0 for row in rows) and [row["unit"] for row in rows] == ["ns", "µs"] * 5
    assert json.loads(json.dumps(rows)) == rows
    per_token, per_request = rows[2]["value"] * 1e-9, rows[3]["value"] * 1e-6
    assert per_request == pytest.approx(8192 * per_token)


def test_the_work_is_done() -> None:
    work = blocks._work(0)
    managers = []
    for name, function in work:
        function()
        manager = function.__closure__[0].cell_contents if function.__closure__ else None  # type: ignore[attr-defined]
        if name == "look up":
            assert len(function()) == 511  # type: ignore[arg-type]
        managers.append(manager)
    pool = next(each for each in managers if isinstance(each, blocks.BlockManager))
    assert len(pool.pool.cached) == 512 + 32 and pool.num_free_blocks == pool.num_usable_blocks


def test_beside_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from mini_engine.bench import vllm_blocks

    monkeypatch.setattr(blocks, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm_blocks, "measure", lambda repeats: {"free": 8192e-9})
    rows = {row["name"]: row for row in blocks.figures(repeats=1)}
    assert rows["free per token"]["peer"] == pytest.approx(1.0) and "peer" not in rows["hash per token"]
    assert rows["free per token"]["ratio_to_peer"] == pytest.approx(1.0 / rows["free per token"]["value"])
