"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mini_engine.analysis import FittedStep
from mini_engine.errors import ConfigError
from mini_engine.eviction import POLICIES
from mini_engine.simulator.cli import main, parse_step

DATA = Path(__file__).resolve().parent.parent / "data" / "traces"


def test_the_book_example_by_default(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name, total in (("fixed", "870.5"), ("continuous", "765.6"), ("chunked", "844.3")):
        assert f"== {name}\n4 requests" in out and f"{total} ms" in out


def test_one_policy_as_json(capsys):
    assert main(["--policy", "chunked", "--json", "--gap-ms", "130"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_rounds"], figures["num_good"]) == (11, 3)
    assert figures["duration_s"] == pytest.approx(0.84425, abs=5e-5)


def test_a_mooncake_trace(capsys):
    assert main([str(DATA / "chat.jsonl"), "--json", "--limit", "9", "--block-size", "512", "--num-blocks", "99"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["num_requests"], figures["num_usable_blocks"]) == (9, 98)
    assert figures["prefix_hit_rate"] > 0


def test_switches_reach_the_scheduler(capsys):
    trace = str(DATA / "chat.jsonl")
    found = {}
    for switch in ("--batching=continuous", "--no-prefix-caching", "--batching=fixed", "--step=5,0,0", "--speed=50"):
        assert main([trace, "--json", "--num-blocks", "9000", switch]) == 0
        found[switch] = json.loads(capsys.readouterr().out)
    assert found["--no-prefix-caching"]["prefix_hit_rate"] == 0 < found["--batching=continuous"]["prefix_hit_rate"]
    assert len({figures["ttft_s"]["p50"] for figures in found.values()}) == 5


def test_eviction_policies_find_different_prefixes(capsys):
    rates = set()
    for policy in POLICIES:
        switches = ["--json", "--num-blocks=30", "--block-size=512", f"--eviction-policy={policy}"]
        assert main([str(DATA / "chat.jsonl"), *switches]) == 0
        rates.add(json.loads(capsys.readouterr().out)["prefix_hit_rate"])
    assert len(rates) == len(POLICIES)


def test_agent_sessions_from_a_directory_and_rounds(capsys):
    assert main([str(DATA), "--session-gap", "3", "--rounds"]) == 0
    out = capsys.readouterr().out
    assert "21 requests" in out and "session_b/6.1" in out and "… and" in out


def test_files_are_written(tmp_path, capsys):
    assert main(["--trace", str(tmp_path / "t.json"), "--plot", str(tmp_path / "p.svg")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "p.svg",
        "t-chunked.json",
        "t-continuous.json",
        "t-fixed.json",
    ]
    assert json.loads((tmp_path / "t-fixed.json").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "p.svg").read_text()
    assert main(["--policy", "fixed", "--trace", str(tmp_path / "one.json")]) == 0
    assert (tmp_path / "one.json").is_file()


def test_the_bench_prints_its_table_beside_the_json(capsys):
    assert main([str(DATA / "chat.jsonl"), "--json", "--bench"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_requests"] == 36
    assert "µs/sequence" in captured.err


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["missing"], "missing: No such file"),
        (["--step", "1,2"], "three numbers"),
        (["--step", "1,-2,3"], "at least 0, got -2e-06"),
        (["--plot", "p.nonsense"], "nonsense"),
        ([str(DATA / "chat.jsonl"), "--trace-block-size", "400"], "chat.jsonl: line 1: "),
        ([str(DATA / "chat.jsonl"), "--num-blocks", "20"], "request 0 (line"),
        ([str(DATA / "chat.jsonl"), "--speed", "0"], "speed"),
        ([str(DATA / "chat.jsonl"), "--max-num-seqs", "0"], "max_num_seqs"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "Traceback" not in error


def test_a_limit_of_nothing_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--limit", "0"])
    assert exit_.value.code == 2 and "at least 1" in capsys.readouterr().err


def test_a_bad_line_is_named_by_number(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    shutil.copy(DATA / "chat.jsonl", path)
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace('"hash_ids": [0, ', '"hash_ids": [')
    path.write_text("\n".join(lines))
    assert main([str(path)]) == 1
    assert "mine.jsonl: line 5: " in capsys.readouterr().err


def test_parse_step():
    assert parse_step("5,10,0") == FittedStep(5e-3, 10e-6, 0.0)
    with pytest.raises(ConfigError, match="three numbers"):
        parse_step("a,b,c")
