"""What one round of the model takes, for any mix of chunks, without computing the context first.

    measure_rounds(engine, [[Chunk(1, 2048)] * 16, [Chunk(256)]], repeats=5)

Time does not depend on the values in the cache, so the pool is filled with random ones and each chunk gets blocks of
its own. Only the forward pass is timed: no scheduling, no sampling, no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from mini_engine.analysis import Chunk, blocks_needed
from mini_engine.engine import LLMEngine
from mini_engine.errors import PoolTooSmall
from mini_engine.scheduler import ScheduledSequence, SchedulerOutput
from mini_engine.sequence import SamplingParams
from mini_engine.sequence import Sequence as Request


@dataclass(frozen=True)
class MeasuredRound:
    """A round's work and its times in seconds, one per repeat, in the order in which they were taken."""

    chunks: tuple[Chunk, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The fastest repeat: other programs on the machine can only add time."""
        return min(self.times)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.new for chunk in self.chunks)

    @property
    def num_pairs(self) -> int:
        return sum(chunk.pairs for chunk in self.chunks)

    @property
    def row(self) -> tuple[int, int, float]:
        """(new tokens, causal pairs, seconds), what `simulator.fit_run` takes."""
        return self.num_tokens, self.num_pairs, self.seconds


def measure_rounds(
    engine: LLMEngine,
    rounds: Sequence[Sequence[Chunk]],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[MeasuredRound]:
    """Time each round `repeats` times after one that does not count, all rounds in turn, so that a slow minute of the
    machine falls on all of them.

    The engine must be idle, and its KV pool is overwritten. Raises PoolTooSmall, with the numbers, for a round that
    does not fit, and ValueError while requests are in flight or where there is nothing to do.
    """
    if engine.has_unfinished_requests():
        raise ValueError(
            "the engine has requests in flight, whose KV the measurement would overwrite: finish them first"
        )
    if repeats < 1 or not all(rounds):
        raise ValueError(f"every round needs a chunk, and repeats must be at least 1, got {repeats}")
    outputs = [_output(engine, chunks) for chunks in rounds]
    engine.reset_prefix_cache()  # the values behind remembered prefixes are about to change
    for tensor in (engine.runner.kv.k, engine.runner.kv.v):
        tensor[:, 1:].normal_()  # block 0 is the null block and stays zero
    times: list[list[float]] = [[] for _ in rounds]
    for repeat in tqdm(range(repeats + 1), desc="rounds", unit="sweep"):
        for output, taken in zip(outputs, times, strict=True):
            start = clock()
            engine.runner.execute(output)
            if engine.runner.device.type == "cuda":
                torch.cuda.synchronize(engine.runner.device)
            if repeat:
                taken.append(clock() - start)
    return [MeasuredRound(tuple(chunks), tuple(taken)) for chunks, taken in zip(rounds, times, strict=True)]


def _output(engine: LLMEngine, chunks: Sequence[Chunk]) -> SchedulerOutput:
    """A scheduler's output for these chunks, one-token ones first, on consecutive blocks from 1 on."""
    size, scheduled, first = engine.config.block_size, [], 1
    for i, chunk in enumerate(sorted(chunks, key=lambda chunk: chunk.new > 1)):
        length = chunk.history + chunk.new
        blocks = blocks_needed(length, size)
        tokens = [(7919 * (i + 1) + 31 * j) % engine.model_config.vocab_size for j in range(length)]
        seq = Request(f"round-{i}", tokens, SamplingParams(max_tokens=1))
        seq.block_table = list(range(first, first + blocks))
        first += blocks
        scheduled.append(ScheduledSequence(seq, chunk.history, chunk.new))
    if first > engine.runner.num_blocks:
        raise PoolTooSmall(
            f"the round needs {first - 1} blocks of {size} tokens, the pool has {engine.runner.num_blocks - 1}. "
            f"Set num_gpu_blocks_override to at least {first}, or measure fewer or shorter contexts"
        )
    sampled = tuple((item.seq, row) for row, item in enumerate(scheduled))
    return SchedulerOutput(tuple(scheduled), sampled, (), ())
