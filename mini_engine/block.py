"""A block of KV as the allocator sees it, and a list of blocks that any of them leaves in O(1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mini_engine.cache_key import CacheKey

BlockCopy = tuple[int, int]
_LINKED = "a list's two ends are always linked"


@dataclass(eq=False, slots=True)
class Block:
    """One block of the pool and its place in a free queue.

    block_hash: hash of all tokens up to the end of this block, None while it is not findable.
    parent_hash, tokens: what `block_hash` was made from, so that a hash collision is noticed. The first block of a
        prefix has the cache key in place of a parent.
    depth: blocks before this one in its prefix.
    num_copies: copies, scheduled and not yet done, that read or write this block.
    """

    block_id: int
    ref_count: int = 0
    num_copies: int = 0
    block_hash: int | None = None
    parent_hash: int | CacheKey | None = None
    tokens: tuple[int, ...] = ()
    depth: int = 0
    prev_free: Block | None = None
    next_free: Block | None = None


class BlockList:
    """A linked list through the blocks themselves. A block is in one list at most."""

    def __init__(self) -> None:
        first, last = Block(-1), Block(-1)  # never given out: they save the special cases of an empty list
        first.next_free, last.prev_free = last, first
        self._first, self._last = first, last

    def __iter__(self) -> Iterator[Block]:
        block = self._first.next_free
        while block is not None and block is not self._last:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        last = self._last
        before = last.prev_free
        assert before is not None, _LINKED
        before.next_free, block.prev_free = block, before
        block.next_free, last.prev_free = last, block

    def first(self) -> Block:
        """The first block, or the list's end where it is empty: a place to insert before."""
        block = self._first.next_free
        assert block is not None, _LINKED
        return block

    def insert(self, block: Block, successor: Block) -> None:
        before = successor.prev_free
        assert before is not None, _LINKED
        before.next_free, block.prev_free = block, before
        block.next_free, successor.prev_free = successor, block

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, "only a block of a list leaves it"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None

    def pop(self) -> Block | None:
        """The first block, taken out; None where there is none."""
        first, block = self._first, self._first.next_free
        assert block is not None, _LINKED
        if block is self._last:
            return None
        after = block.next_free
        assert after is not None, _LINKED
        first.next_free, after.prev_free = after, first
        block.prev_free = block.next_free = None
        return block
