"""The host tier of a running scheduler: which prefix blocks are copied out when the pool gives them up, and which of
them a request gets back. No tensors here.

    a known block is given out              →  (block, slot) joins the step's `swap_out`
    a request's next blocks are on the host →  fetch or recompute? (slot, block) pairs join its `swap_in`

The transfers of `host_tier.py` run in virtual time: they price a decision, and say from when on a copy is looked for.
What is right does not rest on them but on order: copies are done in the order of the steps, in each step all those out
before all those in. So a slot may be read from the step on that writes it. The one thing to be kept is that a step
writes no slot that it reads, since it would be written first; that is what `fetch` holds slots for.

Source: book 8.3.4 (admission, eviction, swap and recompute are four decisions).
"""

from __future__ import annotations

from collections.abc import Callable

from mini_engine.block import Block, BlockCopy
from mini_engine.block_manager import BlockManager
from mini_engine.host_tier import BlockName, HostTier
from mini_engine.sequence import Sequence


class PrefixTier:
    """Drives one `HostTier` for one scheduler, which calls `end_step` when it has chosen all of a step.

    clock: seconds.
    first_slot: index of the tier's first slot in host memory; those before it belong to preempted sequences.
    host.counts: all decisions by (what, choice, reason). host.log: set it to be told each with its numbers, e.g. to
        the `append` of a list for `decisions.write_json_lines`.
    """

    def __init__(self, host: HostTier, clock: Callable[[], float], first_slot: int = 0):
        self.host = host
        self.clock = clock
        self._offset = first_slot - 1  # the tier's own slots are numbered from 1
        self._copies_out: list[BlockCopy] = []
        self._held: list[Block] = []  # slots that the step being scheduled reads
        host.on_write = self._copy_out

    def attach(self, blocks: BlockManager) -> None:
        """Offer the host what the pool of `blocks` gives up, and find it under the names that `blocks` uses."""
        self.blocks = blocks
        blocks.pool.on_evict = self._offer

    def end_step(self) -> list[BlockCopy]:
        """The (block, slot) copies of what this step's blocks held before."""
        self.host.pool.release(self._held)
        copies, self._copies_out, self._held = self._copies_out, [], []
        return copies

    def fetch(self, seq: Sequence, num_hits: int) -> list[int]:
        """Slots of the blocks that follow the `num_hits` found in the pool, where fetching them is the faster way.

        To be called before `seq` gets its blocks: what those give up may need a slot.
        """
        size = self.blocks.block_size
        now = self.clock()
        names = [self._name(seq, i) for i in range((seq.num_tokens - 1) // size)]
        self.host.settle(now)
        self.host.use([key for key, _, _ in names])
        found = self.host.find(names[num_hits:])
        if not self.host.choose(found, now) or self.host.fetch(found, now).ready_s is None:
            return []
        for slot in found:
            self.host.pool.share(slot)
        self._held += found
        return [slot.block_id + self._offset for slot in found]

    def _offer(self, block: Block) -> None:
        self.host.offer(block, self.clock())

    def _name(self, seq: Sequence, i: int) -> BlockName:
        key, tokens = self.blocks.hash_of(seq, i)
        return key, self.blocks.parent_of(seq, i), tokens

    def _copy_out(self, block: Block, slot: Block) -> None:
        self._copies_out.append((block.block_id, slot.block_id + self._offset))
