"""The client script: its arithmetic by hand, and one run against our own server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_client
import pytest
from streaming_client import BenchError, Sample, read_stream

from tests.builders import tiny_llama_dir
from tests.serving import NAME, RunningServer

OPTIONS = ["--num-prompts=4", "--concurrency", "1", "3", "--input-len=20", "--output-len=5", "--vocab-size=300"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(str(tiny_llama_dir(tmp_path_factory.mktemp("model")))) as running:
        yield running


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = bench_client.main(args)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def lines(*events: Any) -> list[bytes]:
    """As on the wire, with the blank lines and comments that may stand between."""
    found = [b": ping\n", b"\n"]
    for event in events:
        found += [b"data: " + (event.encode() if isinstance(event, str) else json.dumps(event).encode()) + b"\n", b"\n"]
    return found


CHUNK = {"choices": [{"index": 0, "text": "x"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}


class TestReadStream:
    def test_times_of_the_chunks(self) -> None:
        ticks = iter([3.0, 3.5, 5.0])
        sample = read_stream(lines(CHUNK, CHUNK, CHUNK, USAGE, "[DONE]"), 1.0, lambda: next(ticks))
        assert sample == Sample(ttft=2.0, latency=4.0, gaps=[0.5, 1.5], prompt_tokens=7, output_tokens=4)

    @pytest.mark.parametrize(
        ("events", "message"),
        [
            ([CHUNK, {"error": {"message": "out of memory"}}, "[DONE]"], "broke off an answer: out of memory"),
            ([CHUNK, USAGE], "ended an answer without"),
            ([CHUNK, "[DONE]"], "no usage at the end"),
            ([USAGE, "[DONE]"], "sent no tokens"),
        ],
    )
    def test_answers_that_are_none(self, events: list[Any], message: str) -> None:
        with pytest.raises(BenchError, match=message):
            read_stream(lines(*events), 0.0, lambda: 1.0)


class TestSummary:
    def test_by_hand(self) -> None:
        samples = [Sample(1.0, 5.0, [1.0, 3.0], 10, 5), Sample(2.0, 4.0, [2.0], 20, 2), Sample(9.0, 9.0, [], 30, 1)]
        level = bench_client.summarise(samples, 10.0, concurrency=2)
        assert (level["num_requests"], level["prompt_tokens"], level["output_tokens"]) == (3, 60, 8)
        assert (level["output_tokens_per_s"], level["total_tokens_per_s"]) == (0.8, 6.8)
        assert level["ttft_s"] == {"median": 2.0, "p95": pytest.approx(2 + 0.9 * 7)}
        assert level["itl_s"] == {"median": 2.0, "p95": pytest.approx(2.9)}
        assert level["tpot_s"] == {"median": 1.5, "p95": pytest.approx(1.95)}  # 4 s over 4 tokens, 2 s over 1

    @pytest.mark.parametrize(
        ("values", "share", "expected"),
        [([], 0.5, None), ([4.0], 0.95, 4.0), ([2, 1], 0.5, 1.5), (list(range(101)), 0.95, 95)],
    )
    def test_percentile(self, values: list[float], share: float, expected: float | None) -> None:
        assert bench_client.percentile(values, share) == expected


class TestPrompts:
    def test_shared_prefix_then_each_its_own(self) -> None:
        prompts = bench_client.make_prompts(50, 40, 30, 300, "0 1")
        assert {len(prompt) for prompt in prompts} == {40}
        assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
        assert len({tuple(prompt[30:]) for prompt in prompts}) == 50
        assert all(100 <= token < 300 for prompt in prompts for token in prompt)

    def test_a_seed_repeats_and_another_differs(self) -> None:
        first, again, other = (bench_client.make_prompts(2, 9, 3, 300, seed) for seed in ("0 1", "0 1", "0 2"))
        assert first == again
        assert first[0][0] != other[0][0] or first[0][1:3] != other[0][1:3]


class TestAgainstOurServer:
    def test_the_report_has_the_figures(self, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
        before = server.metric("generation_tokens_total")
        status, out, _ = run("--base-url", server.base_url, *OPTIONS, "--json", capsys=capsys)
        report = json.loads(out)
        assert (status, report["model"]) == (0, NAME)
        assert [level["concurrency"] for level in report["levels"]] == [1, 3]
        for level in report["levels"]:
            assert (level["num_requests"], level["prompt_tokens"], level["output_tokens"]) == (4, 80, 20)
            assert level["output_tokens_per_s"] == pytest.approx(20 / level["seconds"])
            assert level["total_tokens_per_s"] == pytest.approx(100 / level["seconds"])
            assert all(0 < level[key]["median"] <= level[key]["p95"] for key in ("ttft_s", "itl_s", "tpot_s"))
            assert level["prefix_cache_hit_rate"] == 0
        assert server.metric("generation_tokens_total") - before == 5 + 2 * 20  # the warm-up's and the levels'

    def test_a_shared_prefix_is_found(self, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
        options = [*OPTIONS, "--seed", "1", "--shared-prefix-len", "16", "--json"]
        _, out, _ = run("--base-url", server.base_url + "/v1/", *options, capsys=capsys)
        alone, _ = json.loads(out)["levels"]
        assert alone["prefix_cache_hit_rate"] == 3 * 16 / (4 * 20)  # all but the first, 4 blocks of 4 tokens

    def test_table_and_comparison(
        self, server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, out, _ = run("--base-url", server.base_url, *OPTIONS, "--seed", "2", "--json", capsys=capsys)
        (tmp_path / "other.json").write_text(out)
        options = [*OPTIONS, "--seed", "2", "--compare", str(tmp_path / "other.json")]
        status, out, _ = run("--base-url", server.base_url, *options, capsys=capsys)
        assert status == 0
        assert "tiny at http://127.0.0.1" in out and "times as good as tiny at" in out
        headings = [line.split() for line in out.splitlines() if line.lstrip().startswith("clients")]
        assert [len(heading) for heading in headings] == [15, 13]  # with the prefix hits, and without
        assert [line.split()[0] for line in out.splitlines() if line[:8].strip() in ("1", "3")] == ["1", "3"] * 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--model", "other"], "says 404: the model 'other' is not served here"),
            (["--input-len", "500"], "says 400: 500 prompt + 5 output tokens exceed max_model_len 128"),
            (["--vocab-size", "9000"], "is outside the model's vocabulary"),
            (["--vocab-size", "100"], "--vocab-size 100 leaves no token ids"),
            (["--shared-prefix-len", "20"], "must be shorter than the prompt of 20"),
            (["--concurrency", "9"], "have a prompt for every client (--num-prompts 4)"),
            (["--concurrency", "2", "2"], "each must be there once"),
            (["--compare", "no-such-file.json"], "no-such-file.json is no report of this script"),
        ],
        ids=str,
    )
    def test_what_cannot_be_measured_is_one_line(
        self, server: RunningServer, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, err = run("--base-url", server.base_url, *OPTIONS, *options, capsys=capsys)
        assert (status, out) == (2, "")
        assert err.startswith("bench_client: ") and message in err and err.count("\n") == 1


def test_no_server_there(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run("--base-url", f"http://127.0.0.1:{unused_port}", capsys=capsys)
    assert status == 2
    assert f"no server answers at http://127.0.0.1:{unused_port} (" in err
    assert f"mini-engine serve --port {unused_port}" in err and err.count("\n") == 1


class TestRatios:
    LEVEL = {
        "concurrency": 1,
        **{name: {"median": 2.0, "p95": 4.0} for name in ("ttft_s", "itl_s", "tpot_s")},
        "output_tokens_per_s": 10.0,
        "total_tokens_per_s": 30.0,
    }
    REPORT = {"model": "m", "base_url": "here", "settings": dict.fromkeys(bench_client.SAME, 1), "levels": [LEVEL]}

    def test_above_one_is_better_here(self) -> None:
        half = {
            **self.LEVEL,
            "ttft_s": {"median": 8.0, "p95": 4.0},
            "output_tokens_per_s": 5.0,
            "itl_s": {"median": 1.0, "p95": None},
        }
        text = bench_client.ratio_table(self.REPORT, {**self.REPORT, "base_url": "there", "levels": [half]})
        assert text.splitlines()[-1].split() == ["1", "4.00", "1.00", "0.50", "-", "1.00", "2.00", "1.00"]

    def test_other_settings_or_levels_are_not_compared(self) -> None:
        other = {**self.REPORT, "settings": dict.fromkeys(bench_client.SAME, 1) | {"seed": 2}}
        with pytest.raises(BenchError, match="they differ in seed 1 and 2"):
            bench_client.ratio_table(self.REPORT, other)
        with pytest.raises(BenchError, match=r"no concurrency in common: \[4\] there"):
            bench_client.ratio_table(self.REPORT, {**self.REPORT, "levels": [{**self.LEVEL, "concurrency": 4}]})

    def test_reports_are_read_from_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
        for path in paths:
            Path(path).write_text(
                json.dumps({**self.REPORT, "levels": [{**self.LEVEL, "prefix_cache_hit_rate": None}]})
            )
        status, _, err = run("--read", paths[0], "--compare", paths[1], "--json", capsys=capsys)
        assert status == 0 and "1.00" in err
