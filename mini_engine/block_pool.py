"""The pool of KV blocks: reference counts, the free queue in the order of giving out, and the prefix cache's map.

A block is free when no sequence references it and no step that was scheduled still has to copy it. Free blocks that
hold a known prefix stay findable until they are given out again, oldest first.

Source: PagedAttention (Kwon et al. 2023); order of the free queue and hash chain as in vLLM V1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NULL_BLOCK = 0
BlockCopy = tuple[int, int]


@dataclass(eq=False, slots=True)
class Block:
    """One block of the pool and its place in the free queue (a linked list, so that any block leaves it in O(1)).

    block_hash: hash of all tokens up to the end of this block, None while it is not findable.
    parent_hash, tokens: what `block_hash` was made from, so that a hash collision is noticed.
    num_copies: copies, scheduled and not yet done, that read or write this block.
    """

    block_id: int
    ref_count: int = 0
    num_copies: int = 0
    block_hash: int | None = None
    parent_hash: int | None = None
    tokens: tuple[int, ...] = ()
    prev_free: Block | None = None
    next_free: Block | None = None


def hash_block(parent_hash: int | None, tokens: tuple[int, ...], salt: str | None = None) -> int:
    """Hash of a full block in its context. `salt` enters the first block only; the chain carries it on."""
    return hash((parent_hash, tokens, salt) if parent_hash is None else (parent_hash, tokens))


class BlockPool:
    """All blocks: the free queue in the order they are given out, and the hash -> block map of the prefix cache.

    Block 0, the null block, is never given out: padding may point at it.
    """

    def __init__(self, num_blocks: int):
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.cached: dict[int, Block] = {}
        self.num_free = 0
        head, tail = Block(-1), Block(-1)
        head.next_free, tail.prev_free = tail, head
        self._head, self._tail = head, tail
        for block in self.blocks[1:]:
            self._insert_before(tail, block)

    def free_blocks(self) -> Iterator[Block]:
        """The free queue from the next block to be given out to the last."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def take(self) -> Block:
        """The next free block, now with one reference. What it held is forgotten. The caller checks `num_free`."""
        block = self._head.next_free
        assert block is not None and block is not self._tail, "take() on an empty pool: callers check num_free"
        self._unlink(block)
        self.forget(block)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """One more reference, to a block in use or to a free one that a prefix search found."""
        if block.ref_count == 0 and block.num_copies == 0:
            self._unlink(block)
        block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each. Those nobody needs any more become free: blocks without a hash go to the
        front of the queue, in the order given, the others to its end, where they live longest."""
        unused = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0 and block.num_copies == 0:
                unused.append(block)
        self._make_free(unused)

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
                    self._make_free([block])

    def find(self, block_hash: int, parent_hash: int | None, tokens: tuple[int, ...]) -> Block | None:
        """The block with this content, or None. A block with the same hash and other content is no hit."""
        block = self.cached.get(block_hash)
        if block is not None and block.tokens == tokens and block.parent_hash == parent_hash:
            return block
        return None

    def remember(self, block: Block, block_hash: int, parent_hash: int | None, tokens: tuple[int, ...]) -> None:
        """Make a full block findable. Where another block already has this content, that one stays the known one."""
        if block_hash not in self.cached:
            self.cached[block_hash] = block
            block.block_hash, block.parent_hash, block.tokens = block_hash, parent_hash, tokens

    def forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self.cached[block.block_hash]
            block.block_hash, block.parent_hash, block.tokens = None, None, ()

    def _make_free(self, blocks: list[Block]) -> None:
        front = self._head.next_free
        for block in blocks:
            if block.block_hash is None:
                self._insert_before(front, block)
        for block in blocks:
            if block.block_hash is not None:
                self._insert_before(self._tail, block)

    def _insert_before(self, successor: Block | None, block: Block) -> None:
        assert successor is not None and successor.prev_free is not None, "the queue's two ends are always linked"
        before = successor.prev_free
        before.next_free, block.prev_free = block, before
        block.next_free, successor.prev_free = successor, block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        assert block.prev_free is not None and block.next_free is not None
        block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free
        block.prev_free = block.next_free = None
        self.num_free -= 1
