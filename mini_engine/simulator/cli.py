"""`simulate`: replay a trace, or the book's four requests, and print what happened."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from mini_engine.analysis import BOOK_STEP, FittedStep, Objective
from mini_engine.config import SchedulerConfig
from mini_engine.errors import ConfigError, EngineError
from mini_engine.eviction import POLICIES
from mini_engine.simulator.bench import cost_table, step_costs
from mini_engine.simulator.examples import book_policies, book_requests
from mini_engine.simulator.loop import Simulator, simulate
from mini_engine.simulator.report import request_table, round_table, summary, summary_table
from mini_engine.simulator.timeline import Timeline
from mini_engine.simulator.traces import MOONCAKE_BLOCK_SIZE, load_agent_sessions, load_mooncake
from mini_engine.simulator.workloads import Request, at_speed

MAX_CHUNKED_REQUESTS = 200
"""Above that many requests a run does not note every round's parts: no Gantt chart has that many lanes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    add = parser.add_argument
    add(
        "workload",
        nargs="*",
        type=Path,
        help="a Mooncake .jsonl trace, or agent sessions (.json files, a directory); none: the book's four requests",
    )
    add(
        "--policy",
        choices=list(book_policies()),
        help="of the book's example: one of its three policies (default: all)",
    )
    add(
        "--step",
        default=None,
        metavar="MS,US,NS",
        help="cost of a step: ms + µs a token + ns a causal pair (default: the book's fit, 26.22,30.4,3)",
    )
    add("--limit", type=_count, help="replay only that many requests")
    add("--speed", type=float, default=1.0, help="let requests arrive that many times as fast")
    add("--session-gap", type=float, default=0.0, metavar="S", help="seconds between the starts of agent sessions")
    add("--trace-block-size", type=int, default=MOONCAKE_BLOCK_SIZE, help="tokens an id of a Mooncake trace stands for")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--long-prefill-token-threshold", type=int, default=0)
    add("--block-size", type=int, default=16)
    add("--num-blocks", type=int, default=200_000)
    add("--max-model-len", type=int, help="default: as long as the longest request")
    add("--no-prefix-caching", action="store_true")
    add("--batching", choices=["continuous", "fixed"], default="continuous")
    add("--admission", choices=["preempt", "reserve"], default="preempt")
    add("--eviction-policy", choices=POLICIES, default="lru", help="of the prefix cache (default: %(default)s)")
    add("--ttft-ms", type=float, help="objective: time to first token")
    add("--gap-ms", type=float, help="objective: longest gap between output tokens")
    add("--total-ms", type=float, help="objective: arrival to last token")
    add("--rounds", action="store_true", help="print the rounds too")
    add("--json", action="store_true", help="print the summary as JSON and nothing else")
    add("--trace", type=Path, metavar="OUT.json", help="write a Chrome trace, for ui.perfetto.dev")
    add(
        "--plot",
        type=Path,
        metavar="OUT.svg",
        help="write a picture: a Gantt chart of few requests, the KV occupancy of many",
    )
    add("--bench", action="store_true", help="print what a round costs here, early and late")


def run(args: argparse.Namespace) -> int:
    """Run `simulate`. Returns the exit code; what cannot work is one line on stderr and 1."""
    try:
        return _run(args)
    except EngineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    return 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mini_engine.simulator", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    step = BOOK_STEP if args.step is None else parse_step(args.step)
    timelines = _replay(args, step) if args.workload else _book_example(args, step)
    objective = _objective(args)
    if args.json:
        summaries = {name: summary(timeline, objective) for name, timeline in timelines.items()}
        print(json.dumps(summaries if len(summaries) > 1 else next(iter(summaries.values())), indent=2))
    else:
        for name, timeline in timelines.items():
            print(f"\n== {name}")
            print(*_sections(timeline, objective, args.rounds), sep="\n\n")
    _write_files(args, timelines)
    return 0


def parse_step(text: str) -> FittedStep:
    """A step from "ms,µs,ns". Raises ConfigError."""
    try:
        base, per_token, per_pair = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--step wants three numbers, ms,µs,ns, as in 26.22,30.4,3; got {text!r}") from None
    return FittedStep(base / 1e3, per_token / 1e6, per_pair / 1e9)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _book_example(args: argparse.Namespace, step: FittedStep) -> dict[str, Timeline]:
    policies = book_policies()
    names = [args.policy] if args.policy else list(policies)
    return {name: simulate(at_speed(book_requests(), args.speed), policies[name], step) for name in names}


def _replay(args: argparse.Namespace, step: FittedStep) -> dict[str, Timeline]:
    requests = at_speed(_load(args), args.speed)
    longest = max(request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests)
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_prefix_caching=not args.no_prefix_caching,
        batching=args.batching,
        admission=args.admission,
        eviction_policy=args.eviction_policy,
        max_model_len=args.max_model_len or longest,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
    )
    simulator = Simulator(requests, config, step, keep_chunks=len(requests) <= MAX_CHUNKED_REQUESTS)
    if args.bench:
        print(cost_table(step_costs(simulator)), file=sys.stderr)
    return {", ".join(path.name for path in args.workload): simulator.run()}


def _load(args: argparse.Namespace) -> list[Request]:
    if len(args.workload) == 1 and args.workload[0].suffix == ".jsonl":
        return load_mooncake(args.workload[0], args.trace_block_size, args.limit)
    paths = args.workload[0] if len(args.workload) == 1 else args.workload
    return load_agent_sessions(paths, args.session_gap)[: args.limit]


def _objective(args: argparse.Namespace) -> Objective | None:
    limits = [None if value is None else value / 1e3 for value in (args.ttft_ms, args.gap_ms, args.total_ms)]
    return Objective(*limits) if any(limit is not None for limit in limits) else None


def _sections(timeline: Timeline, objective: Objective | None, rounds: bool) -> list[str]:
    shown = [summary_table(timeline, objective), request_table(timeline)]
    return [*shown, round_table(timeline)] if rounds else shown


def _write_files(args: argparse.Namespace, timelines: Mapping[str, Timeline]) -> None:
    if args.trace:
        from mini_engine.simulator.perfetto import write_chrome_trace

        for path, timeline in _paths(args.trace, timelines):
            write_chrome_trace(timeline, path)
    if args.plot:
        _plot(args.plot, timelines)


def _plot(path: Path, timelines: Mapping[str, Timeline]) -> None:
    from mini_engine.simulator import plots

    few = all(len(timeline.requests) <= plots.MAX_LANES for timeline in timelines.values())
    try:
        figure = plots.gantt(timelines) if few else plots.kv_occupancy(next(iter(timelines.values())))
        figure.savefig(path, transparent=True)
    except ImportError:
        raise ConfigError("--plot needs matplotlib, which the extra [course] installs") from None
    except ValueError as error:  # a file type that matplotlib does not write
        raise ConfigError(f"--plot {path}: {error}") from None


def _paths(path: Path, timelines: Mapping[str, Timeline]) -> list[tuple[Path, Timeline]]:
    """One file for each timeline: the path itself, or with the timeline's name in it."""
    if len(timelines) == 1:
        return [(path, timeline) for timeline in timelines.values()]
    return [(path.with_stem(f"{path.stem}-{name}"), timeline) for name, timeline in timelines.items()]
