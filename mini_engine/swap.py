"""Preemption by swap: which host slot holds which block of a sequence that had to leave the pool. No tensors here.

    swap out    blocks 7 3 9 of the victim  →  host slots 0 1 2     then the blocks are free
    swap in     host slots 0 1 2  →  blocks 4 5 8                   then the slots are free

A swapped sequence keeps `num_computed_tokens`: it computes nothing twice, at the price of two copies over the link.
The slots are copied to and from by `host_kv.py`, in the order in which `SchedulerOutput` lists them.

Source: PagedAttention (Kwon et al. 2023) 4.5, which offers both ways; book 8.3.2 prices recompute.
"""

from __future__ import annotations

from collections.abc import Iterable

from mini_engine.block import BlockCopy
from mini_engine.config import SchedulerConfig
from mini_engine.scheduler_output import SchedulerStats
from mini_engine.sequence import Sequence


class HostBlocks:
    """The host's slots, each as large as a block of the pool. Counts what it does in `stats`."""

    def __init__(self, config: SchedulerConfig, stats: SchedulerStats):
        self.num_slots = config.num_host_blocks
        self.block_size = config.block_size
        self.stats = stats
        self._enabled = config.preemption_mode == "swap"
        self._free = list(range(self.num_slots - 1, -1, -1))

    def swap_out(self, seq: Sequence, lost_copies: Iterable[BlockCopy]) -> tuple[BlockCopy, ...]:
        """Give every block of `seq` that holds computed tokens a slot; the (block, slot) copies to be done.

        lost_copies: (source, destination) copies for `seq` that will not be done any more; what its table calls the
        destination is still to be found in the source.
        Nothing, where preemption is not by swap or the slots do not suffice: then all is computed again.
        """
        num_blocks = -(-seq.num_computed_tokens // self.block_size)
        if not self._enabled or not num_blocks:
            return ()
        if num_blocks > len(self._free):
            self.stats.num_swap_fallbacks += 1
            return ()
        self.stats.num_swapped_out_blocks += num_blocks
        seq.host_slots = [self._free.pop() for _ in range(num_blocks)]
        source = {target: source for source, target in lost_copies}
        blocks = [source.get(block, block) for block in seq.block_table[:num_blocks]]
        return tuple(zip(blocks, seq.host_slots, strict=True))

    def swap_in(self, seq: Sequence, num_hits: int) -> tuple[BlockCopy, ...]:
        """The (slot, block) copies that bring back what the prefix cache no longer had, beyond `num_hits` blocks."""
        if not seq.host_slots:
            return ()
        table = seq.block_table[num_hits : len(seq.host_slots)]
        copies = tuple(zip(seq.host_slots[num_hits:], table, strict=True))
        self.stats.num_swapped_in_blocks += len(copies)
        self.drop(seq)
        return copies

    def drop(self, seq: Sequence) -> None:
        """What `seq` has here is not needed any more."""
        self._free.extend(reversed(seq.host_slots))
        seq.host_slots = []

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every slot is free or belongs to one of `sequences`, all that are alive. Raises AssertionError."""
        owned = [slot for seq in sequences for slot in seq.host_slots]
        assert sorted(owned + self._free) == list(range(self.num_slots)), (
            f"host slots: {sorted(owned)} owned, {sorted(self._free)} free, of {self.num_slots}"
        )
