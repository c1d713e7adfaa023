"""What the block manager costs: `python -m mini_engine.bench.blocks`, JSON like `mini-engine bench --json`.

    hash       the content of an 8,192-token prompt, 512 blocks of 16
    look up    the same prompt again, its hashes known, all but the last block found
    allocate   512 blocks for a prompt that finds nothing, made findable
    append     one token after another, a new block every 16th
    free       all of them

Medians over repeats, garbage collection off, one process, no torch. vLLM's block manager does the same work where
`vllm` is importable.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any

from mini_engine.bench.rows import row
from mini_engine.block_manager import BlockManager
from mini_engine.info import commit, processor_name, versions
from mini_engine.sequence import SamplingParams, Sequence

PROMPT, BLOCK, APPENDED = 8192, 16, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    report = {
        "title": "Block manager",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": {"device": f"{processor_name()}, 1 thread"},
        "versions": versions(),
        "settings": {
            "model": "none",
            "dtype": "none",
            "input_len": PROMPT,
            "output_len": APPENDED,
            "repeats": args.repeats,
        },
        "figures": list(figures(args.repeats)),
    }
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


def figures(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of work, per token and, for a prompt, per request."""
    times = measure(repeats)
    peer: dict[str, float] = {}
    if find_spec("vllm"):
        from mini_engine.bench.vllm_blocks import measure as measure_vllm

        peer = measure_vllm(repeats)
    for name, how, tokens in (
        ("hash", "content hashes of all full blocks of a prompt", PROMPT),
        ("look up", "the same prompt again, hashes known", PROMPT),
        ("allocate", "blocks for a prompt that finds nothing, hashes known", PROMPT),
        ("append", "one token after another: room for it, and the hash of what is full", APPENDED),
        ("free", "give all blocks back", PROMPT),
    ):
        for unit, scale, per in (("ns", 1e9 / tokens, "token"), ("µs", 1e6, "request")):
            beside = ("vLLM", peer[name] * scale) if name in peer else None
            how_often = f"{how}; median, {tokens} tokens in blocks of {BLOCK}"
            yield row(f"{name} per {per}", times[name] * scale, unit, how_often, None, beside, less_is_better=True)


def measure(repeats: int) -> dict[str, float]:
    """Seconds for each kind of work on one prompt."""
    return medians(_work(repeat) for repeat in range(repeats))


def _work(repeat: int) -> Iterator[tuple[str, Callable[[], object]]]:
    blocks = BlockManager(3 * PROMPT // BLOCK, BLOCK)
    prompt = prompt_tokens(repeat)
    seq, again = _sequence(prompt), _sequence(prompt)

    def hash_all() -> None:
        for i in range(PROMPT // BLOCK):
            blocks.hash_of(seq, i)

    def allocate() -> None:
        blocks.admit(seq, blocks.match_prefix(seq))
        seq.num_computed_tokens = PROMPT
        blocks.cache_full_blocks(seq, 0, PROMPT // BLOCK)

    def append() -> None:
        for token in range(APPENDED):
            seq.token_ids.append(token)
            end = len(seq.token_ids)
            blocks.grow(seq, end)
            seq.num_computed_tokens = end
            if end % BLOCK == 0:
                blocks.cache_full_blocks(seq, end // BLOCK - 1, end // BLOCK)

    yield "hash", hash_all
    yield "allocate", allocate
    blocks.match_prefix(again)
    yield "look up", lambda: blocks.match_prefix(again)
    yield "append", append
    yield "free", lambda: blocks.free(seq)


def medians(rounds: Iterable[Iterable[tuple[str, Callable[[], object]]]]) -> dict[str, float]:
    """Median seconds of each named piece of work, over rounds that each do all of them in order."""
    taken: dict[str, list[float]] = {}
    for work in rounds:
        for name, function in work:
            gc.disable()
            start = time.perf_counter()
            function()
            taken.setdefault(name, []).append(time.perf_counter() - start)
            gc.enable()
    return {name: median(values) for name, values in taken.items()}


def prompt_tokens(repeat: int) -> list[int]:
    return [(repeat * 7919 + 31 * i) % 50_000 for i in range(PROMPT)]


def _sequence(prompt: list[int]) -> Sequence:
    return Sequence("r", list(prompt), SamplingParams(max_tokens=APPENDED, ignore_eos=True))


if __name__ == "__main__":
    raise SystemExit(main())
