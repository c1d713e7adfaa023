"""The pool of KV blocks: reference counts, the free queue in the order of giving out, and the prefix cache's map.

A block is free when no sequence references it and no step that was scheduled still has to copy it. Free blocks that
hold a known prefix stay findable until they are given out again, in the order of an eviction policy (`eviction.py`).

Source: PagedAttention (Kwon et al. 2023); order of the free queue and hash chain as in vLLM V1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from mini_engine.block import Block, BlockCopy, BlockList
from mini_engine.cache_key import CacheKey
from mini_engine.eviction import LRU, EvictionPolicy

NULL_BLOCK = 0


class BlockPool:
    """All blocks: the free queue in the order they are given out, and the hash -> block map of the prefix cache.

    Block 0, the null block, is never given out: padding may point at it.
    policy: the order in which free blocks that hold a known prefix are given out, after all others; None is LRU.
    on_evict: told of each such block just before what it holds is forgotten, with its hash, parent and tokens.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None):
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.cached: dict[int, Block] = {}
        self.policy: EvictionPolicy = policy or LRU()
        self._tell = self.policy.learns
        self.on_evict: Callable[[Block], None] | None = None
        self.num_free = 0
        self._blank = BlockList()  # free, without a hash
        for block in self.blocks[1:]:
            self._blank.append(block)
            self.num_free += 1

    def free_blocks(self) -> Iterator[Block]:
        """The free queue from the next block to be given out to the last."""
        return chain(self._blank, self.policy)

    def take(self) -> Block:
        """The next free block, now with one reference. What it held is forgotten. The caller checks `num_free`."""
        block = self._blank.pop()
        if block is None:
            block = self.policy.pop()
            assert block is not None, "take() on an empty pool: callers check num_free"
            if self.on_evict is not None:
                self.on_evict(block)
            self._drop_hash(block)
        self.num_free -= 1
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more reference, to a block in use or to a free one that a prefix search found."""
        if block.ref_count == 0 and block.num_copies == 0:
            if block.block_hash is None:
                self._blank.remove(block)
            else:
                self.policy.remove(block)
            self.num_free -= 1
        block.ref_count += 1

    def reuse(self, block: Block) -> None:
        """One more reference, by a request that found the block: what an eviction policy counts as a hit."""
        self.share(block)
        if self._tell:
            self.policy.hit(block)

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each. Those nobody needs any more become free: blocks without a hash go to the
        front of the queue, in the order given, the others to its end, where they live longest."""
        front, add, num_freed = self._blank.first(), self.policy.add, 0
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0 and block.num_copies == 0:
                num_freed += 1
                if block.block_hash is None:
                    self._blank.insert(block, front)
                else:
                    add(block)
        self.num_free += num_freed

    def hold(self, copies: Iterable[BlockCopy]) -> None:
        """Keep both ends of each copy from being given out until `unhold`."""
        for copy in copies:
            for block_id in copy:
                self.blocks[block_id].num_copies += 1

    def unhold(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for block_id in copy:
                block = self.blocks[block_id]
                block.num_copies -= 1
                if block.ref_count == 0 and block.num_copies == 0:
                    block.ref_count = 1  # the copy was its last user
                    self.release((block,))

    def find(self, block_hash: int, parent_hash: int | CacheKey, tokens: tuple[int, ...]) -> Block | None:
        """The block with this content, or None. A block with the same hash and other content is no hit."""
        block = self.cached.get(block_hash)
        if block is not None and block.tokens == tokens and block.parent_hash == parent_hash:
            return block
        return None

    def remember(
        self, block: Block, block_hash: int, parent_hash: int | CacheKey, tokens: tuple[int, ...], depth: int = 0
    ) -> None:
        """Make a full block findable. Where another block already has this content, that one stays the known one.

        depth: blocks before it in its prefix.
        """
        if block_hash not in self.cached:
            self.cached[block_hash] = block
            block.block_hash, block.parent_hash, block.tokens = block_hash, parent_hash, tokens
            block.depth = depth
            if self._tell:
                self.policy.remembered(block)

    def forget(self, block: Block) -> None:
        """Make a block unfindable. One that is free stays so, and moves behind the other free blocks without a hash."""
        if block.block_hash is None:
            return
        if block in self.policy:
            self.policy.remove(block)
            self._blank.append(block)
        self._drop_hash(block)

    def forget_all(self) -> None:
        """Empty the prefix cache. The order of the free queue stays as it is."""
        for block in [*self.policy, *self.cached.values()]:
            self.forget(block)

    def _drop_hash(self, block: Block) -> None:
        assert block.block_hash is not None
        if self._tell:
            self.policy.forgotten(block)
        del self.cached[block.block_hash]
        block.block_hash, block.parent_hash, block.tokens = None, None, ()
