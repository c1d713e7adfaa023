"""`policies`: which eviction policy keeps the prefixes of a trace that are wanted again, and what a host tier adds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mini_engine.analysis import BOOK_PREFILL_MFU, GiB, get_hardware, get_link, get_model
from mini_engine.analysis.inputs import whole
from mini_engine.decisions import Decision, write_json_lines
from mini_engine.errors import ConfigError, EngineError
from mini_engine.eviction import POLICIES, make_policy
from mini_engine.host_tier import ADMISSIONS, HostTier
from mini_engine.simulator.agents import agent_requests
from mini_engine.simulator.report import format_table
from mini_engine.simulator.tiers import PrefixPrices, PrefixReplay, ReuseReport, belady_report, keyed_trace
from mini_engine.simulator.traces import MOONCAKE_BLOCK_SIZE, load_agent_sessions, load_mooncake
from mini_engine.simulator.workloads import Request
from mini_engine.transfer import TransferLink


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    add = parser.add_argument
    add(
        "workload",
        nargs="*",
        type=Path,
        help="a Mooncake .jsonl trace, or agent sessions (.json files, a directory); none: made-up agent sessions",
    )
    add("--sessions", type=int, default=60, metavar="N", help="made-up sessions (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the made-up sessions (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N requests")
    add("--session-gap", type=float, default=0.0, metavar="S", help="seconds between the starts of agent sessions")
    add("--trace-block-size", type=int, default=MOONCAKE_BLOCK_SIZE, help="tokens an id of a Mooncake trace stands for")
    add("--pool-gib", default="8,32", metavar="GiB,…", help="KV pools to try (default: %(default)s)")
    add("--policies", default=",".join(POLICIES), metavar="NAME,…", help="default: %(default)s")
    add(
        "--half-life",
        type=float,
        metavar="USES",
        help='of "value": block uses (default: as many as the pool has blocks)',
    )
    add("--host-gib", type=float, metavar="GiB", help="a host tier of that size (default: none)")
    add("--host-policy", choices=POLICIES, default="lru", help="default: %(default)s")
    add("--admission", choices=ADMISSIONS, default="always", help="to the host (default: %(default)s)")
    add("--link", default="pcie5-x16", help="to the host (default: %(default)s)")
    add("--latency-us", type=float, default=20.0, metavar="US", help="of each transfer (default: %(default)s)")
    add("--model", default="qwen3-8b", help="default: %(default)s")
    add("--hardware", default="rtx-pro-6000", help="default: %(default)s")
    add("--mfu", type=float, default=BOOK_PREFILL_MFU, help="of a prefill (default: %(default)s, the book's)")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--log", type=Path, metavar="OUT.jsonl", help="write the host tier's decisions; takes one pool and one policy")


def run(args: argparse.Namespace) -> int:
    """Run `policies`. Returns the exit code; what cannot work is one line on stderr and 1."""
    try:
        reports = _reports(args)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps([_figures(report) for report in reports], indent=2) if args.json else table(reports))
    return 0


def table(reports: list[ReuseReport]) -> str:
    """One row a run. Hits are shares of all prompt tokens; saved is of the seconds that computing them all takes."""
    headers = ["policy", "blocks", "hits", "host hits", "saved", "saved s", "waited s", "upkeep s", "evicted"]
    rows = []
    for report in reports:
        bound = not report.full_recompute_s
        rows.append(
            [
                report.policy,
                f"{report.num_blocks:,}",
                f"{report.hit_ratio:.1%}",
                "-" if bound else f"{report.host_hit_tokens / max(1, report.prompt_tokens):.1%}",
                *("-" if bound else text for text in (f"{report.saved_share:.1%}", f"{report.saved_s:,.1f}")),
                *("-" if bound else text for text in (f"{report.wait_s:,.1f}", f"{report.upkeep_s:,.1f}")),
                "-" if bound else f"{report.num_evictions:,}",
            ]
        )
    counts = [
        f"  {report.policy}, {report.num_blocks:,} blocks: {kind} {count:,}"
        for report in reports
        for kind, count in report.decisions.items()
    ]
    return "\n".join(
        [format_table(headers, rows), *(["", "host tier (what / choice / reason):"] if counts else []), *counts]
    )


def _figures(report: ReuseReport) -> dict[str, Any]:
    return {**asdict(report), "hit_ratio": report.hit_ratio, "saved_share": report.saved_share}


def _reports(args: argparse.Namespace) -> list[ReuseReport]:
    trace = keyed_trace(_load(args))
    whole(1, **{"--limit": args.limit or 1})
    prices = PrefixPrices(get_model(args.model), get_hardware(args.hardware), trace.block_size, args.mfu)
    pools = [_blocks(text, prices) for text in args.pool_gib.split(",")]
    names = args.policies.split(",")
    for name in names:
        make_policy(name, 1)  # its refusal, before anything runs
    if args.log and (len(pools), len(names)) != (1, 1):
        raise ConfigError(f"--log takes one pool and one policy, got {len(pools)} and {len(names)}: name them")
    decisions: list[Decision] = []
    reports = []
    for num_blocks in pools:
        host = _host_blocks(args, prices)
        reports.append(belady_report(trace, prices, num_blocks + host))
        for name in names:
            tier = _tier(args, prices, decisions.append if args.log else None)
            reports.append(PrefixReplay(trace, prices, num_blocks, name, tier, args.half_life).run())
    if args.log:
        write_json_lines(decisions, args.log)
    return reports


def _load(args: argparse.Namespace) -> list[Request]:
    if not args.workload:
        return agent_requests(args.sessions, args.seed)[: args.limit]
    if len(args.workload) == 1 and args.workload[0].suffix == ".jsonl":
        return load_mooncake(args.workload[0], args.trace_block_size, args.limit)
    paths = args.workload[0] if len(args.workload) == 1 else args.workload
    return load_agent_sessions(paths, args.session_gap)[: args.limit]


def _blocks(text: str, prices: PrefixPrices) -> int:
    try:
        blocks = int(float(text) * GiB) // prices.block_bytes
    except (ValueError, OverflowError):
        raise ConfigError(f"--pool-gib wants numbers with commas between them, as in 8,32; got {text!r}") from None
    if blocks < 1:
        raise ConfigError(f"--pool-gib {text} holds no block of {prices.block_bytes / GiB:.3f} GiB")
    return blocks


def _host_blocks(args: argparse.Namespace, prices: PrefixPrices) -> int:
    return int(args.host_gib * GiB) // prices.block_bytes if args.host_gib else 0


def _tier(args: argparse.Namespace, prices: PrefixPrices, log: Callable[[Decision], None] | None) -> HostTier | None:
    if not args.host_gib:
        return None
    link = TransferLink(get_link(args.link).bandwidth, args.latency_us / 1e6)
    slots = max(1, _host_blocks(args, prices))
    policy = make_policy(args.host_policy, slots, prices.block_saving)
    size, budget = prices.block_bytes, int(args.host_gib * GiB)
    return HostTier(budget, size, prices.block_size, link, prices.recompute_s, args.admission, policy, log=log)
