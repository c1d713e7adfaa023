"""What a step is: the tokens to compute, the tokens to draw, and the blocks to move before either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.block import BlockCopy
from mini_engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Compute the tokens `start` to `start + num_tokens - 1` of `seq`."""

    seq: Sequence
    start: int
    num_tokens: int


class SchedulerOutput(NamedTuple):
    """One step's work. It stays true while the sequences move on.

    scheduled: what to compute, in the order of the batch.
    sampled: the sequences to draw a token for, each with the index in `scheduled` after whose last token it draws;
        siblings of an `n > 1` request share one.
    preempted: sequences that lost their blocks in this step and wait again.
    block_copies: (source, destination) blocks to copy before the forward pass.
    swap_out, swap_in: (block, host slot) and (host slot, block) copies, done before `block_copies`, in this order: of
        preempted sequences, and of prefixes that the pool gives up or that a request gets back.
    step: its number, from 1; steps land in this order.
    """

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[tuple[Sequence, int], ...]
    preempted: tuple[Sequence, ...]
    block_copies: tuple[BlockCopy, ...]
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    step: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass
class SchedulerStats:
    """Counters since the start. Prefix figures are in tokens, over admissions; the peak and the swaps are in blocks.

    host_hit_tokens: found beyond those of the pool, and fetched from the host (prefix_tier.py).
    num_swap_fallbacks: preemptions that were to be swaps, and were recomputed since the host memory was full.
    """

    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    peak_used_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_swap_fallbacks: int = 0
