"""Runs of which the blocks are the point: branches, preemption and a cancel, with a model or without (lab 8-3).

served = serve([four_requests], config, engine)    counts are the scheduler's own, the same with and without engine
cancelled = cancel(engine, config, requests, victim="A", outputs=16)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mini_engine.config import SchedulerConfig
from mini_engine.scheduler import Scheduler, SchedulerOutput
from mini_engine.sequence import SamplingParams
from mini_engine.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from mini_engine import LLMEngine
    from mini_engine.scheduler import SchedulerStats


class Asked(NamedTuple):
    """A request by its tokens."""

    name: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass
class Served:
    """What a run held and did. references: most entries of all block tables together; seconds: of the last wave.

    positions: tokens computed in each wave. tokens: request → its outputs, one list for each of its `n`.
    copies: blocks copied before they were written. stats: the scheduler's counters at the end.
    """

    references: int
    stats: SchedulerStats
    positions: list[int] = field(default_factory=list)
    seconds: float = 0.0
    copies: int = 0
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Most blocks in use at a time."""
        return self.stats.peak_used_blocks


class WatchedScheduler(Scheduler):
    """A scheduler that notes how many table entries there are after each decision, and the copies it ordered."""

    references = copies = 0

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self.references = max(self.references, sum(len(seq.block_table) for seq in self.running))
        self.copies += len(output.block_copies)
        return output


def serve(waves: Sequence[Sequence[Asked]], config: SchedulerConfig, engine: LLMEngine | None = None) -> Served:
    """Serve waves of requests, each when the one before has ended. Without an engine, tokens are made up.

    config: how to schedule; an engine's pool must have at least as many blocks, of the same size.
    Raises ValueError where it has not, RequestError for a request that could never be served.
    """
    scheduler = WatchedScheduler(config)
    served = Served(0, scheduler.stats)
    if engine is not None:
        _use(engine, scheduler)
    for wave in waves:
        before, start = scheduler.stats.num_scheduled_tokens, time.perf_counter()
        for asked in wave:
            _add(scheduler, engine, asked, served)
        while engine.has_unfinished_requests() if engine else scheduler.has_unfinished():
            if engine:
                engine.step()
            else:
                _made_up_step(scheduler)
        served.seconds = time.perf_counter() - start
        served.positions.append(scheduler.stats.num_scheduled_tokens - before)
    served.references, served.copies = scheduler.references, scheduler.copies
    return served


def _add(scheduler: Scheduler, engine: LLMEngine | None, asked: Asked, served: Served) -> None:
    if engine is None:
        scheduler.add(EngineSequence(asked.name, list(asked.prompt), asked.params))
        return
    record = engine.add_request(asked.name, {"prompt_token_ids": list(asked.prompt)}, asked.params)
    served.tokens[asked.name] = [output.token_ids for output in record.outputs]


def _made_up_step(scheduler: Scheduler) -> None:
    """Every branch of every request draws tokens of its own, below zero: no prompt holds them."""
    output = scheduler.schedule()
    scheduler.update(output, [-1 - seq.index - 64 * seq.arrival for seq, _ in output.sampled])


def _use(engine: LLMEngine, scheduler: Scheduler) -> None:
    """Let the engine schedule with this one; its tensors stay."""
    config, runner = scheduler.config, engine.runner
    if config.block_size != runner.block_size or config.num_blocks > runner.num_blocks:
        raise ValueError(
            f"config has {config.num_blocks} blocks of {config.block_size}, the engine {runner.num_blocks} of "
            f"{runner.block_size}"
        )
    if engine.has_unfinished_requests():
        raise ValueError(f"the engine still serves {len(engine.requests)} requests: step it to their end first")
    engine.scheduler = scheduler


class Cancelled(NamedTuple):
    """A cancel in two moments, in seconds since `abort` was called, and the free blocks around them.

    returned_s: the call came back. freed_s: the step that was in flight had landed, and the blocks were seen free.
    """

    returned_s: float
    freed_s: float
    free_before: int
    free_at_return: int
    free_after: int


def cancel(
    engine: LLMEngine, config: SchedulerConfig, requests: Sequence[Asked], victim: str, outputs: int
) -> Cancelled:
    """Abort `victim` when it has drawn so many tokens, look at the pool, take one more step, and look again.

    The other requests run to their end afterwards. Blocks that they take in that one step would be missing from
    `free_after`: choose lengths at which none of them begins a block.
    """
    scheduler, clock = Scheduler(config), time.perf_counter
    _use(engine, scheduler)
    records = {
        asked.name: engine.add_request(asked.name, {"prompt_token_ids": list(asked.prompt)}, asked.params)
        for asked in requests
    }
    while len(records[victim].outputs[0].token_ids) < outputs:
        engine.step()
    free = scheduler.blocks.num_free_blocks
    start = clock()
    engine.abort(victim)
    returned, at_return = clock() - start, scheduler.blocks.num_free_blocks
    engine.step()
    freed, after = clock() - start, scheduler.blocks.num_free_blocks
    while engine.has_unfinished_requests():
        engine.step()
    return Cancelled(returned, freed, free, at_return, after)


def repeated(run: Callable[[], Cancelled], times: int) -> Cancelled:
    """The median times of several runs. Raises ValueError where they do not agree in their blocks."""
    runs = [run() for _ in range(times)]
    if len({one[2:] for one in runs}) > 1:
        raise ValueError(f"the runs differ in their free blocks: {[one[2:] for one in runs]}")
    return Cancelled(median(one.returned_s for one in runs), median(one.freed_s for one in runs), *runs[0][2:])
