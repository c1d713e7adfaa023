"""Paged KV: who owns which block. Block ids only; the tensors live in `kv_cache.py`.

    position p of a sequence  ->  block_table[p // block_size], offset p % block_size

A block table only grows, full blocks never change, and sharing is a reference count. A block is free when no
sequence references it and no step that was scheduled still has to copy it. Free blocks that hold a known prefix
stay findable until they are given out again, oldest first.

Source: PagedAttention (Kwon et al. 2023); order of the free queue and hash chain as in vLLM V1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from mini_engine.sequence import Sequence

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


class BlockManager:
    """Gives blocks to sequences, shares them, and takes them back."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[Block]:
        """Known blocks that hold the start of `seq`: whole blocks, and at least one token is left to compute."""
        if not self.enable_prefix_caching:
            return []
        hits: list[Block] = []
        parent_hash = None
        for i in range((seq.num_tokens - 1) // self.block_size):
            block_hash, tokens = self._hash_of(seq, i)
            block = self.pool.find(block_hash, parent_hash, tokens)
            if block is None:
                break
            hits.append(block)
            parent_hash = block_hash
        return hits

    def num_shared(self, hits: list[Block]) -> int:
        """How many of the found blocks are in use anyway, so that taking them needs no free block."""
        return sum(block.ref_count > 0 or block.num_copies > 0 for block in hits)

    def admit(self, seq: Sequence, hits: list[Block]) -> None:
        """Give a waiting sequence its found blocks and free ones for the rest of its known tokens.

        The caller has checked that they are free. All known tokens get their blocks now, however many steps the
        prefill takes, so that two long prompts cannot each be half admitted and then thrash.
        """
        for block in hits:
            self.pool.share(block)
        seq.block_table = [block.block_id for block in hits]
        seq.num_computed_tokens = len(hits) * self.block_size
        for _ in range(self.blocks_for(seq.num_tokens) - len(hits)):
            seq.block_table.append(self.pool.take().block_id)

    def grow(self, seq: Sequence, num_tokens: int) -> Seq[BlockCopy] | None:
        """Make room for the first `num_tokens` tokens of `seq`, with a copy of its own of a tail it shares.

        Returns the (source, destination) copies to be done before the step, or None, with nothing changed, where
        the pool has too few free blocks.
        """
        table = seq.block_table
        copy_tail = self.needs_copy(seq)
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0 and not copy_tail:
            return ()
        if missing + copy_tail > self.pool.num_free:
            return None
        for _ in range(missing):
            table.append(self.pool.take().block_id)
        if not copy_tail:
            return ()
        i = seq.num_computed_tokens // self.block_size
        source, table[i] = table[i], self.pool.take().block_id
        copies = ((source, table[i]),)
        self.pool.hold(copies)
        self.pool.release([self.pool.blocks[source]])
        return copies

    def needs_copy(self, seq: Sequence) -> bool:
        """Whether the next token of `seq` lands in a started block that another sequence also references."""
        i, offset = divmod(seq.num_computed_tokens, self.block_size)
        return offset > 0 and self.pool.blocks[seq.block_table[i]].ref_count > 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`. Whoever writes into the shared tail first copies it."""
        for block_id in parent.block_table:
            self.pool.share(self.pool.blocks[block_id])
        child.block_table = list(parent.block_table)

    def cache_full_blocks(self, seq: Sequence, first: int, last: int) -> None:
        """Make the blocks `first` to `last - 1` of `seq`, which are full and computed, findable."""
        if not self.enable_prefix_caching:
            return
        for i in range(first, last):
            block_hash, tokens = self._hash_of(seq, i)
            parent_hash = seq.block_hashes[i - 1] if i else None
            block = self.pool.blocks[seq.block_table[i]]
            if block.block_hash is None:
                self.pool.remember(block, block_hash, parent_hash, tokens)

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back, the last one first, so that the start of a prefix outlives its end."""
        self.pool.release([self.pool.blocks[block_id] for block_id in reversed(seq.block_table)])
        seq.block_table = []

    def reset_prefix_cache(self) -> bool:
        """Forget every known prefix. Refuses (False) while any block is in use."""
        if self.pool.num_free != self.num_usable_blocks:
            return False
        for block in list(self.pool.cached.values()):
            self.pool.forget(block)
        return True

    def check(self, sequences: Iterable[Sequence]) -> None:
        """The specification of a correct state; `sequences` are all that are alive. Raises AssertionError.

        Tests call this after every step.
        """
        owners = [0] * self.num_blocks
        for seq in sequences:
            assert NULL_BLOCK not in seq.block_table, f"{seq} owns the null block"
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq} holds a block twice: {seq.block_table}"
            assert not seq.block_table or seq.num_computed_tokens <= len(seq.block_table) * self.block_size, (
                f"{seq} computed tokens that its {len(seq.block_table)} blocks cannot hold"
            )
            for block_id in seq.block_table:
                owners[block_id] += 1
        queue = [block.block_id for block in self.pool.free_blocks()]
        free = set(queue)
        assert len(queue) == len(free) == self.pool.num_free, f"free queue {queue}, counter {self.pool.num_free}"
        for block in self.pool.blocks[1:]:
            i = block.block_id
            assert block.ref_count == owners[i], f"block {i}: {block.ref_count} references, {owners[i]} owners"
            assert (i in free) == (owners[i] == 0 and block.num_copies == 0), f"block {i}: owned and free, or lost"
            assert (block.block_hash is None) == (block.tokens == ()), f"block {i}: half a hash"
        for block_hash, block in self.pool.cached.items():
            assert block.block_hash == block_hash, f"the cache finds block {block.block_id} under a hash it has lost"
        for seq in sequences:
            self._check_content(seq)

    def _check_content(self, seq: Sequence) -> None:
        """A findable block of `seq` was hashed from the very tokens that `seq` has there."""
        for i, block_id in enumerate(seq.block_table):
            tokens = self.pool.blocks[block_id].tokens
            if tokens:
                start = i * self.block_size
                content = seq.block_content(start, start + self.block_size)
                assert tokens == content, f"{seq}: block {i} is another's"
                assert start + self.block_size <= seq.num_computed_tokens, f"{seq}: block {i} is hashed, not computed"

    def _hash_of(self, seq: Sequence, i: int) -> tuple[int, tuple[int, ...]]:
        """Hash and tokens of the i-th block of `seq`, which is full. Hashes are kept on the sequence."""
        start = i * self.block_size
        tokens = seq.block_content(start, start + self.block_size)
        if i == len(seq.block_hashes):
            parent = seq.block_hashes[i - 1] if i else None
            seq.block_hashes.append(hash_block(parent, tokens, seq.cache_salt))
        return seq.block_hashes[i], tokens
