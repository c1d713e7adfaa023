"""The KV pool at one moment, as data: who owns which block, what is free, what is still found. Read only.

    view(scheduler)                  one moment
    record(scheduler, engine.step)   one view before and after every step of a run, to leaf through

Nothing here is kept by the engine: a view is made when asked for, in time that grows with the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mini_engine.block import Block
from mini_engine.block_pool import NULL_BLOCK
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence

STATES = ("free", "cached-free", "used", "shared", "in flight", "null")


@dataclass(frozen=True)
class BlockView:
    """One block.

    state: one of STATES. "cached-free" may be given out, and until then be found by its prefix; "in flight" belongs to
        nobody any more, but a submitted step still reads or writes it.
    owners: the sequences that map it; a request's further outputs are called `id.1`, `id.2`, …
    filled: slots that hold a computed token. hash: eight hexadecimal digits, or None while it cannot be found.
    """

    block_id: int
    state: str
    owners: tuple[str, ...]
    ref_count: int
    filled: int
    hash: str | None


@dataclass(frozen=True)
class PoolView:
    """step: number of the last step scheduled. free_queue: free blocks, the next to be given out first.

    tables: block table of every sequence that has one, in the order of admission; those in flight come last.
    waiting: the sequences without blocks, and on_host those of them whose KV lies in host memory, with its blocks.
    """

    step: int
    block_size: int
    blocks: tuple[BlockView, ...]
    free_queue: tuple[int, ...]
    tables: dict[str, tuple[int, ...]]
    waiting: tuple[str, ...]
    on_host: dict[str, int]

    @property
    def num_references(self) -> int:
        """Entries of all block tables."""
        return sum(len(table) for table in self.tables.values())

    @property
    def num_used(self) -> int:
        """Blocks that are not free."""
        return len(self.blocks) - 1 - len(self.free_queue)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dictionaries, numbers and texts only."""
        return asdict(self)


def view(scheduler: Scheduler) -> PoolView:
    """The pool of `scheduler` as it is now."""
    manager, size = scheduler.blocks, scheduler.config.block_size
    alive, ended = scheduler.running, manager.in_flight
    owners: dict[int, list[str]] = {}
    filled: dict[int, int] = {}
    for seq in [*alive, *ended]:
        for i, block_id in enumerate(seq.block_table):
            computed = min(size, max(0, seq.num_computed_tokens - i * size))
            filled[block_id] = max(filled.get(block_id, 0), computed)
            if seq not in ended:
                owners.setdefault(block_id, []).append(_name(seq))
    queue = tuple(block.block_id for block in manager.pool.free_blocks())
    free = set(queue)
    blocks = tuple(
        BlockView(
            block.block_id,
            _state(block, block.block_id in free, len(owners.get(block.block_id, ()))),
            tuple(owners.get(block.block_id, ())),
            block.ref_count,
            size if block.block_hash is not None else filled.get(block.block_id, 0),
            None if block.block_hash is None else f"{block.block_hash & (1 << 64) - 1:016x}"[:8],
        )
        for block in manager.pool.blocks
    )
    waiting = sorted(scheduler.waiting, key=scheduler.waiting.rank)
    return PoolView(
        scheduler.steps.step,
        size,
        blocks,
        queue,
        {_name(seq): tuple(seq.block_table) for seq in [*alive, *ended]},
        tuple(_name(seq) for seq in waiting),
        {_name(seq): len(seq.host_slots) for seq in waiting if seq.host_slots},
    )


def record(scheduler: Scheduler, step: Callable[[], object], max_steps: int = 1000) -> list[PoolView]:
    """Call `step` (an engine's, or schedule and update of the scheduler alone) until nothing is left, or `max_steps`
    times; a view of the pool before the first and after each."""
    views = [view(scheduler)]
    while scheduler.has_unfinished() and len(views) <= max_steps:
        step()
        views.append(view(scheduler))
    return views


def _name(seq: Sequence) -> str:
    return f"{seq.request_id}.{seq.index}" if seq.index else seq.request_id


def _state(block: Block, free: bool, num_owners: int) -> str:
    if block.block_id == NULL_BLOCK:
        return "null"
    if free:
        return "free" if block.block_hash is None else "cached-free"
    if num_owners == 0:
        return "in flight"
    return "used" if num_owners == 1 else "shared"
