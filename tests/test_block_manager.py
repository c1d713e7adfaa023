"""The prefix cache and the pool, case by case of the conformance list (1 to 8), and its own errors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest

from mini_engine.block_manager import BlockManager
from mini_engine.cache_key import CacheKey, hash_block
from mini_engine.sequence import Sequence
from tests.scheduling import sequence, unrelated

_names = count()


class Pool(BlockManager):
    """A block manager that computes at once what it admits, as a scheduler with a large budget does."""

    def start(self, prompt: Iterable[int], salt: str | None = None) -> Sequence:
        seq = sequence(f"r{next(_names)}", prompt, cache_salt=salt)
        hits = self.match_prefix(seq)
        assert self.blocks_for(seq.num_tokens) - self.num_shared(hits) <= self.num_free_blocks
        self.admit(seq, hits)
        self.hit = seq.num_computed_tokens
        self.compute(seq, seq.num_tokens)
        return seq

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        first = seq.num_computed_tokens // self.block_size
        seq.num_computed_tokens = num_tokens
        self.cache_full_blocks(seq, first, num_tokens // self.block_size)

    def extend(self, seq: Sequence, tokens: Iterable[int]) -> bool:
        """Append and compute more tokens; False where the pool has no room."""
        seq.token_ids.extend(tokens)
        if self.grow(seq, seq.num_tokens) is None:
            return False
        self.compute(seq, seq.num_tokens)
        return True

    @property
    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_blocks()]


COMMON = list(unrelated(1, 48))


def test_free_queue_order_when_tails_are_unhashed():
    """case-1"""
    pool = Pool(num_blocks=11, block_size=16)
    r0 = pool.start([*COMMON, *unrelated(2, 7)])
    assert (r0.block_table, pool.hit) == ([1, 2, 3, 4], 0)
    r1 = pool.start([*COMMON, *unrelated(3, 5)])
    assert (r1.block_table, pool.hit, pool.num_free_blocks) == ([1, 2, 3, 5], 48, 5)
    pool.free(r0)
    pool.free(r1)
    assert pool.queue == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    r2 = pool.start([*COMMON, *unrelated(4, 6)])
    assert (r2.block_table, pool.hit) == ([1, 2, 3, 5], 48)
    pool.free(r2)
    r3 = pool.start(unrelated(5, 160))
    assert (r3.block_table, pool.hit) == ([5, 4, 6, 7, 8, 9, 10, 3, 2, 1], 0)
    pool.check([r3])


@pytest.mark.parametrize(
    "block_size, prompt, more, num_blocks, num_hashed",
    [
        pytest.param(16, 55, 4, 4, 3, id="case-2-no-new-block"),
        pytest.param(16, 55, 19, 5, 4, id="case-2-one-new-block"),
        pytest.param(16, 55, 9, 4, 4, id="exactly-full"),
        pytest.param(4, 3, 9, 3, 3, id="three-times-full"),
        pytest.param(1, 5, 2, 7, 7, id="one-token-blocks"),
    ],
)
def test_growing(block_size, prompt, more, num_blocks, num_hashed):
    pool = Pool(num_blocks=32, block_size=block_size)
    seq = pool.start(unrelated(0, prompt))
    assert pool.extend(seq, unrelated(1, more))
    assert len(seq.block_table) == num_blocks
    assert [pool.pool.blocks[i].block_hash is not None for i in seq.block_table] == [
        i < num_hashed for i in range(num_blocks)
    ]
    pool.check([seq])


def test_free_queue_order_when_prefixes_are_freed_late():
    """case-3"""
    pool = Pool(num_blocks=11, block_size=16)
    r0 = pool.start(unrelated(0, 87))
    r1 = pool.start(unrelated(1, 48))
    assert (r0.block_table, r1.block_table) == ([1, 2, 3, 4, 5, 6], [7, 8, 9])
    pool.free(r0)
    assert pool.queue == [6, 10, 5, 4, 3, 2, 1]
    pool.free(r1)
    assert pool.queue == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    r2 = pool.start([*unrelated(0, 32), *unrelated(2, 3)])
    assert (r2.block_table, pool.hit, pool.num_free_blocks) == ([1, 2, 6], 32, 7)


def test_a_reused_block_loses_its_hash_at_once():
    """case-4"""
    pool = Pool(num_blocks=4, block_size=4)
    pool.free(pool.start(unrelated(0, 12)))
    assert len(pool.pool.cached) == 3
    pool.start(unrelated(1, 5))  # takes the two blocks at the end of the first prompt
    assert [block.block_id for block in pool.pool.cached.values()] == [1, 3]
    probe = sequence("probe", unrelated(0, 12))
    assert [block.block_id for block in pool.match_prefix(probe)] == [1]


def test_caching_off():
    """case-5"""
    pool = Pool(num_blocks=5, block_size=4, enable_prefix_caching=False)
    r0 = pool.start(unrelated(0, 10))
    assert r0.block_table == [1, 2, 3]
    pool.free(r0)
    r1 = pool.start(unrelated(0, 16))
    assert (r1.block_table, pool.hit) == ([3, 2, 1, 4], 0)
    table = list(r1.block_table)
    assert not pool.extend(r1, unrelated(1, 4))
    assert r1.block_table == table and pool.num_free_blocks == 0


@pytest.mark.parametrize(
    "first, second, hit",
    [(None, None, 32), ("a", "a", 32), ("a", "b", 0), ("a", None, 0), (None, "a", 0), ("", None, 0)],
)
def test_salt(first, second, hit):
    """case-6"""
    pool = Pool(num_blocks=11, block_size=16)
    pool.free(pool.start(COMMON, salt=first))
    pool.start(COMMON, salt=second)
    assert pool.hit == hit


def test_salt_enters_the_first_hash_only():
    """case-6: the chain carries it on."""
    tokens = (1, 2, 3)
    first, salted = hash_block(CacheKey(), tokens), hash_block(CacheKey(salt="a"), tokens)
    assert first != salted
    pool = Pool(num_blocks=11, block_size=3)
    seq = pool.start(tokens * 3, salt="a")
    assert seq.block_hashes == [salted, hash_block(salted, tokens), hash_block(seq.block_hashes[1], tokens)]
    assert hash_block(salted, tokens) != hash_block(first, tokens)


@pytest.mark.parametrize(
    "block_size, cached, prompt, hit",
    [
        pytest.param(16, 48, 48, 32, id="case-7"),
        pytest.param(16, 48, 49, 48, id="one-token-more"),
        pytest.param(16, 47, 60, 32, id="a-part-of-a-block-is-no-hit"),
        pytest.param(16, 16, 16, 0, id="one-block"),
        pytest.param(1, 5, 5, 4, id="one-token-blocks"),
        pytest.param(4, 40, 9, 8, id="shorter-than-what-is-cached"),
    ],
)
def test_hits_leave_one_token(block_size, cached, prompt, hit):
    pool = Pool(num_blocks=64, block_size=block_size)
    pool.start(unrelated(0, cached))
    pool.start(unrelated(0, prompt))
    assert pool.hit == hit


def test_a_hit_needs_the_same_context():
    """Equal tokens after another beginning are another prefix."""
    pool = Pool(num_blocks=32, block_size=4)
    same = list(unrelated(7, 8))
    pool.start([*unrelated(0, 4), *same])
    pool.start([*unrelated(1, 4), *same])
    assert pool.hit == 0
    pool.start([*unrelated(0, 4), *same, 1])
    assert pool.hit == 12


def test_reset_waits_for_the_last_block():
    """case-8"""
    pool = Pool(num_blocks=11, block_size=16)
    seq = pool.start(COMMON)
    assert not pool.reset_prefix_cache()
    assert len(pool.pool.cached) == 3
    pool.free(seq)
    assert pool.reset_prefix_cache()
    pool.start(COMMON)
    assert pool.hit == 0


def test_reset_waits_for_a_copy():
    """case-8: a block that a copy still reads is live, though nobody owns it."""
    pool = Pool(num_blocks=11, block_size=4)
    parent = pool.start(unrelated(0, 6))
    child = parent.fork(1)
    pool.fork(parent, child)
    child.token_ids.append(5)
    copies = pool.grow(child, 7)
    assert copies
    pool.free(parent)
    pool.free(child)
    assert not pool.reset_prefix_cache()
    pool.pool.unhold(copies)
    assert pool.reset_prefix_cache() and pool.num_free_blocks == 10


def test_a_hash_collision_is_no_hit(monkeypatch):
    monkeypatch.setattr("mini_engine.block_manager.hash_block", lambda parent, tokens: 7)
    pool = Pool(num_blocks=32, block_size=4)
    first = pool.start(unrelated(0, 9))
    other = pool.start(unrelated(1, 9))
    assert pool.hit == 0
    pool.check([first, other])
    pool.free(other)
    pool.start(unrelated(0, 9))
    assert pool.hit == 4  # its first block is the one known under 7


def test_a_second_copy_of_a_prefix_stays_unknown_and_goes_first():
    pool = Pool(num_blocks=8, block_size=4)
    first = pool.start(unrelated(0, 4))
    twin = pool.start(unrelated(0, 4))  # all hit but for the last token, so that it is computed again
    assert twin.block_table == [2] and len(pool.pool.cached) == 1
    pool.free(first)
    pool.free(twin)
    assert pool.queue == [2, 3, 4, 5, 6, 7, 1]


@pytest.mark.parametrize("writer", ["parent", "child"])
def test_fork_copies_the_shared_tail_once(writer):
    """The first of two to write gets a copy, the other keeps the block; full blocks stay shared."""
    pool = Pool(num_blocks=11, block_size=4)
    parent = pool.start(unrelated(0, 6))
    child = parent.fork(1)
    pool.fork(parent, child)
    one, other = (parent, child) if writer == "parent" else (child, parent)
    one.token_ids.append(1)
    other.token_ids.append(2)
    copies = pool.grow(one, 7)
    assert copies == ((2, 3),) and one.block_table == [1, 3] and other.block_table == [1, 2]
    assert pool.grow(other, 7) == ()
    pool.check([parent, child])
    pool.pool.unhold(copies)
    pool.check([parent, child])


def test_both_ends_of_a_copy_are_held_until_it_ran():
    pool = Pool(num_blocks=5, block_size=4)
    parent = pool.start(unrelated(0, 6))
    child = parent.fork(1)
    pool.fork(parent, child)
    child.token_ids.append(1)
    copies = pool.grow(child, 7)
    assert copies == ((2, 3),)
    pool.free(parent)
    pool.free(child)
    assert pool.queue == [4, 1]
    pool.check([])
    pool.pool.unhold(copies)
    assert sorted(pool.queue) == [1, 2, 3, 4]
    pool.check([])


def test_growing_changes_nothing_when_the_copy_has_no_room():
    pool = Pool(num_blocks=3, block_size=4)
    parent = pool.start(unrelated(0, 6))
    child = parent.fork(1)
    pool.fork(parent, child)
    child.token_ids.append(1)
    assert pool.grow(child, 7) is None
    assert child.block_table == parent.block_table == [1, 2]
    pool.check([parent, child])


def test_growing_by_several_blocks_takes_all_or_none():
    pool = Pool(num_blocks=5, block_size=4)
    seq = pool.start(unrelated(0, 8))
    assert not pool.extend(seq, unrelated(1, 9))
    assert seq.block_table == [1, 2] and pool.queue == [3, 4]
    pool.check([seq])


def test_fork_at_a_block_boundary_copies_nothing():
    pool = Pool(num_blocks=8, block_size=4)
    parent = pool.start(unrelated(0, 8))
    child = parent.fork(1)
    pool.fork(parent, child)
    for seq in (parent, child):
        seq.token_ids.append(seq.index)
        assert pool.grow(seq, 9) == ()
    assert (parent.block_table, child.block_table) == ([1, 2, 3], [1, 2, 4])
    pool.check([parent, child])


def _lose_a_reference(pool: Pool, seq: Sequence) -> None:
    pool.pool.blocks[seq.block_table[0]].ref_count -= 1


def _free_while_owned(pool: Pool, seq: Sequence) -> None:
    pool.pool.policy.add(pool.pool.blocks[seq.block_table[0]])
    pool.pool.num_free += 1


def _own_a_block_twice(pool: Pool, seq: Sequence) -> None:
    seq.block_table[1] = seq.block_table[0]


def _own_the_null_block(pool: Pool, seq: Sequence) -> None:
    seq.block_table[0] = 0


def _other_tokens(pool: Pool, seq: Sequence) -> None:
    seq.token_ids[0] += 1


def _hash_too_early(pool: Pool, seq: Sequence) -> None:
    seq.num_computed_tokens = 3


def _hash_moved(pool: Pool, seq: Sequence) -> None:
    pool.pool.blocks[seq.block_table[0]].block_hash = 1


def _counted_beyond(pool: Pool, seq: Sequence) -> None:
    seq.num_computed_tokens = 17


def _miscounted(pool: Pool, seq: Sequence) -> None:
    pool.pool.num_free += 1


def _held(pool: Pool, seq: Sequence) -> None:
    pool.pool.blocks[9].num_copies += 1


@pytest.mark.parametrize(
    "damage, says",
    [
        (_lose_a_reference, "0 references, 1 owners"),
        (_free_while_owned, "owned and free"),
        (_own_a_block_twice, "twice"),
        (_own_the_null_block, "null block"),
        (_other_tokens, "another's"),
        (_hash_too_early, "hashed, not computed"),
        (_hash_moved, "a hash it has lost"),
        (_counted_beyond, "cannot hold"),
        (_miscounted, "counter"),
        (_held, "owned and free, or lost"),
    ],
)
def test_check_finds(damage, says):
    pool = Pool(num_blocks=11, block_size=4)
    seq = pool.start(unrelated(0, 14))
    pool.check([seq])
    damage(pool, seq)
    with pytest.raises(AssertionError, match=says):
        pool.check([seq])


def test_check_finds_a_lost_sequence():
    pool = Pool(num_blocks=11, block_size=4)
    pool.start(unrelated(0, 14))
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        pool.check([])
