"""Measure an OpenAI-compatible server from outside: `mini-engine serve` and `vllm serve` alike.

    python labs/bench_client.py --concurrency 1 2 4 8 --input-len 512 --output-len 32
    python labs/bench_client.py --base-url http://127.0.0.1:8001 --json > vllm.json
    python labs/bench_client.py --compare vllm.json

Prompts are token ids drawn from a seed, so that both servers get the same. At each concurrency so many clients send one
prompt after the other and read the answers as streams; no prompt is sent twice, so what a server finds in its prefix
cache is the shared prefix, if one was asked for. (A second run with the same seed finds everything: restart the server,
or take another --seed.)

TTFT is the time from sending to the first token; ITL the time between two chunks of a stream; TPOT the time from the
first token to the last over the tokens in between, which differs where a server puts several tokens into a chunk (book
8.1.3). Only the standard library is used, and nothing of this repository.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streaming_client import BenchError, Client, Sample, run_level

LOWEST_TOKEN = 100  # special tokens often come first
SAME = ("num_prompts", "input_len", "output_len", "shared_prefix_len", "seed", "vocab_size")
FIGURES = (  # key, part of it, heading, scale, whether more is better
    ("ttft_s", "median", "TTFT ms", 1e3, False),
    ("ttft_s", "p95", "p95", 1e3, False),
    ("itl_s", "median", "ITL ms", 1e3, False),
    ("itl_s", "p95", "p95", 1e3, False),
    ("tpot_s", "median", "TPOT ms", 1e3, False),
    ("output_tokens_per_s", None, "out tok/s", 1, True),
    ("total_tokens_per_s", None, "total tok/s", 1, True),
)


def make_prompts(count: int, length: int, shared: int, vocab_size: int, seed: str) -> list[list[int]]:
    """Token ids: the first `shared` are the same in all, the rest is each one's own."""
    if not 0 <= shared < length:
        raise BenchError(f"the shared prefix of {shared} tokens must be shorter than the prompt of {length}")
    if vocab_size <= LOWEST_TOKEN + 1:
        raise BenchError(f"--vocab-size {vocab_size} leaves no token ids: {LOWEST_TOKEN} and up are used")
    draw, tokens = random.Random(seed), range(LOWEST_TOKEN, vocab_size)
    prefix = draw.choices(tokens, k=shared)
    return [[*prefix, *draw.choices(tokens, k=length - shared)] for _ in range(count)]


def summarise(samples: Sequence[Sample], seconds: float, concurrency: int) -> dict[str, Any]:
    """The figures of one concurrency. Times in seconds."""
    output = sum(sample.output_tokens for sample in samples)
    total = output + sum(sample.prompt_tokens for sample in samples)
    tpot = [(s.latency - s.ttft) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1]
    return {
        "concurrency": concurrency,
        "num_requests": len(samples),
        "seconds": seconds,
        "prompt_tokens": total - output,
        "output_tokens": output,
        "ttft_s": _median_and_p95([sample.ttft for sample in samples]),
        "itl_s": _median_and_p95([gap for sample in samples for gap in sample.gaps]),
        "tpot_s": _median_and_p95(tpot),
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": total / seconds,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between the two nearest values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _median_and_p95(values: Sequence[float]) -> dict[str, float | None]:
    return {"median": percentile(values, 0.5), "p95": percentile(values, 0.95)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report: a warm-up, then one level after the other."""
    if len(set(args.concurrency)) < len(args.concurrency) or max(args.concurrency) > args.num_prompts:
        raise BenchError(
            f"--concurrency {args.concurrency}: each must be there once, and have a prompt for every client "
            f"(--num-prompts {args.num_prompts})"
        )
    client = Client(args.base_url, args.timeout)
    model = args.model or client.model()
    settings = {name: getattr(args, name) for name in SAME}
    levels = []
    for concurrency in (0, *args.concurrency):  # 0: the warm-up, one request whose figures are thrown away
        count = args.num_prompts if concurrency else 1
        seed = f"{args.seed} {concurrency}"  # each level its own prompts: none is known to the prefix cache
        prompts = make_prompts(count, args.input_len, args.shared_prefix_len, args.vocab_size, seed)
        bodies = [_body(model, prompt, args.output_len) for prompt in prompts]
        before = _prefix_counters(client)
        samples, seconds = run_level(client, bodies, max(1, concurrency))
        after = _prefix_counters(client)
        if concurrency:
            counted = before and after and after[0] > before[0]
            hit_rate = (after[1] - before[1]) / (after[0] - before[0]) if counted else None
            levels.append(summarise(samples, seconds, concurrency) | {"prefix_cache_hit_rate": hit_rate})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "base_url": args.base_url,
        "model": model,
        "settings": settings,
        "levels": levels,
    }


def _prefix_counters(client: Client) -> list[float]:
    """Tokens looked up in the server's prefix cache, and tokens found; empty where it does not tell."""
    counters = [client.counter(f"vllm:prefix_cache_{each}_total") for each in ("queries", "hits")]
    return [value for value in counters if value is not None] if None not in counters else []


def _body(model: str, prompt: list[int], output_len: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def table(report: dict[str, Any]) -> str:
    """The report for a person."""
    settings = report["settings"]
    shared = f" ({settings['shared_prefix_len']} of them shared)" if settings["shared_prefix_len"] else ""
    head = (
        f"{report['model']} at {report['base_url']}: {settings['num_prompts']} prompts of {settings['input_len']} "
        f"tokens{shared}, {settings['output_len']} out"
    )
    rows = [["clients", *(heading for _, _, heading, _, _ in FIGURES), "prefix hits"]]
    for level in report["levels"]:
        hits = level["prefix_cache_hit_rate"]
        cells = [_number(_figure(level, key, part), scale) for key, part, _, scale, _ in FIGURES]
        rows.append([str(level["concurrency"]), *cells, "-" if hits is None else f"{hits:.0%}"])
    return f"{head}\n\n{_aligned(rows)}"


def ratio_table(report: dict[str, Any], other: dict[str, Any]) -> str:
    """By how much `report` is better than `other` (above 1: faster here), at the concurrencies both have."""
    differing = [name for name in SAME if report["settings"].get(name) != other.get("settings", {}).get(name)]
    if differing:
        pairs = ", ".join(
            f"{name} {report['settings'].get(name)} and {other.get('settings', {}).get(name)}" for name in differing
        )
        raise BenchError(f"the two reports cannot be compared: they differ in {pairs}")
    others = {level["concurrency"]: level for level in other["levels"]}
    rows = [["clients", *(heading for _, _, heading, _, _ in FIGURES)]]
    for level in report["levels"]:
        if level["concurrency"] in others:
            cells = []
            for key, part, _, _, more_is_better in FIGURES:
                mine, theirs = _figure(level, key, part), _figure(others[level["concurrency"]], key, part)
                over, under = (mine, theirs) if more_is_better else (theirs, mine)
                cells.append("-" if not over or not under else f"{over / under:.2f}")
            rows.append([str(level["concurrency"]), *cells])
    if len(rows) == 1:
        raise BenchError(f"no concurrency in common: {sorted(others)} there")
    head = f"times as good as {other['model']} at {other['base_url']} (above 1: {report['base_url']} is better)"
    return f"{head}\n\n{_aligned(rows)}"


def _figure(level: dict[str, Any], key: str, part: str | None) -> float | None:
    return level[key] if part is None else level[key][part]


def _number(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:,.1f}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def read_report(path: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text())
        if not isinstance(report, dict) or "levels" not in report or "settings" not in report:
            raise ValueError("it has no levels")
        return report
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} is no report of this script (written with --json): {error}") from None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="bench_client.py", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    add("--model", metavar="NAME", help="default: the first of /v1/models")
    add("--num-prompts", type=_positive, default=16, metavar="N", help="at each concurrency (default: %(default)s)")
    add("--concurrency", type=_positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="clients at a time")
    add("--input-len", type=_positive, default=512, metavar="TOKENS", help="default: %(default)s")
    add("--output-len", type=_positive, default=32, metavar="TOKENS", help="default: %(default)s")
    add("--shared-prefix-len", type=int, default=0, metavar="TOKENS", help="the same in all prompts of a concurrency")
    add(
        "--vocab-size",
        type=_positive,
        default=10_000,
        metavar="N",
        help="token ids are below it (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (default: %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="for a silent server (default: %(default)s)")
    add("--json", action="store_true", help="print JSON in place of a table")
    add("--read", metavar="FILE.json", help="take this report in place of measuring")
    add("--compare", metavar="FILE.json", help="another report of the same settings: print the ratios as well")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        other = read_report(args.compare) if args.compare else None
        report = read_report(args.read) if args.read else measure(args)
        ratios = ratio_table(report, other) if other else ""
    except BenchError as error:
        print(f"bench_client: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbench_client: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(report, indent=2) if args.json else table(report))
    if ratios:
        print(f"\n{ratios}", file=sys.stderr if args.json else sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
