"""Paged KV: who owns which block. Block ids only; the tensors live in `kv_cache.py`.

    position p of a sequence  ->  block_table[p // block_size], offset p % block_size

A block table only grows, full blocks never change, and sharing is a reference count (`block_pool.py`). A sequence that
ends while a submitted step still computes it keeps its blocks until that step has landed: they are "in flight".

Source: PagedAttention (Kwon et al. 2023); vLLM V1.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from mini_engine.block import Block, BlockCopy
from mini_engine.block_pool import NULL_BLOCK, BlockPool
from mini_engine.cache_key import CacheKey, hash_block
from mini_engine.eviction import EvictionPolicy
from mini_engine.sequence import Sequence


class BlockManager:
    """Gives blocks to sequences, shares them, and takes them back.

    cache_key: what all prefixes have in common besides their tokens; a request adds its salt.
    in_flight: ended sequences whose blocks a submitted step still reads or writes.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        eviction_policy: EvictionPolicy | None = None,
        cache_key: CacheKey | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.cache_key = cache_key or CacheKey()
        self.in_flight: list[Sequence] = []
        self.pool = BlockPool(num_blocks, eviction_policy)

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
        parent: int | CacheKey = self.root(seq)
        for i in range((seq.num_tokens - 1) // self.block_size):
            block_hash, tokens = self.hash_of(seq, i)
            block = self.pool.find(block_hash, parent, tokens)
            if block is None:
                break
            hits.append(block)
            parent = block_hash
        return hits

    def root(self, seq: Sequence) -> CacheKey:
        """What the hash chain of `seq` starts from."""
        return self.cache_key if seq.cache_salt is None else self.cache_key._replace(salt=seq.cache_salt)

    def num_shared(self, hits: list[Block]) -> int:
        """How many of the found blocks are in use anyway, so that taking them needs no free block."""
        return sum(block.ref_count > 0 or block.num_copies > 0 for block in hits)

    def admit(self, seq: Sequence, hits: list[Block]) -> None:
        """Give a waiting sequence its found blocks and free ones for the rest of its known tokens.

        The caller has checked that they are free. All known tokens get their blocks now, however many steps the
        prefill takes, so that two long prompts cannot each be half admitted and then thrash.
        """
        for block in hits:
            self.pool.reuse(block)
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
        missing = -(-num_tokens // self.block_size) - len(table)
        i, offset = divmod(seq.num_computed_tokens, self.block_size)  # needs_copy(), not called: this runs every step
        copy_tail = offset > 0 and self.pool.blocks[table[i]].ref_count > 1
        if missing <= 0 and not copy_tail:
            return ()
        if missing + copy_tail > self.pool.num_free:
            return None
        for _ in range(missing):
            table.append(self.pool.take().block_id)
        if not copy_tail:
            return ()
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
            block_hash, tokens = self.hash_of(seq, i)
            block = self.pool.blocks[seq.block_table[i]]
            if block.block_hash is None:
                self.pool.remember(block, block_hash, self.parent_of(seq, i), tokens, i)

    def free(self, seq: Sequence) -> None:
        """Take all blocks of `seq` back, the last one first, so that the start of a prefix outlives its end."""
        self.pool.release([self.pool.blocks[block_id] for block_id in reversed(seq.block_table)])
        seq.block_table = []

    def free_when_landed(self, seq: Sequence) -> None:
        """Take the blocks of `seq` back when its last step has landed: that step still reads and writes them."""
        self.in_flight.append(seq)

    def land(self, step: int) -> None:
        """All steps up to `step` have landed: blocks that only they still needed become free."""
        landed = [seq for seq in self.in_flight if seq.last_step <= step]
        self.in_flight = [seq for seq in self.in_flight if seq.last_step > step]
        for seq in landed:
            self.free(seq)

    def reset_prefix_cache(self) -> bool:
        """Forget every known prefix. Refuses (False) while any block is in use."""
        if self.pool.num_free != self.num_usable_blocks:
            return False
        self.pool.forget_all()
        return True

    def check(self, sequences: Iterable[Sequence]) -> None:
        """The specification of a correct state; `sequences` are all that are alive. Raises AssertionError.

        A block in flight is neither free nor owned: the ended sequence that had it still counts as a reference.
        Tests call this after every step.
        """
        sequences = [*sequences, *self.in_flight]
        assert len(set(sequences)) == len(sequences), f"a sequence is alive and in flight, or twice: {sequences}"
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

    def hash_of(self, seq: Sequence, i: int) -> tuple[int, tuple[int, ...]]:
        """Hash and tokens of the i-th block of `seq`, which is full. Hashes are kept on the sequence."""
        start = i * self.block_size
        tokens = seq.block_content(start, start + self.block_size)
        if i == len(seq.block_hashes):
            seq.block_hashes.append(hash_block(self.parent_of(seq, i), tokens))
        return seq.block_hashes[i], tokens

    def parent_of(self, seq: Sequence, i: int) -> int | CacheKey:
        """What the hash of the i-th block builds on."""
        return seq.block_hashes[i - 1] if i else self.root(seq)
