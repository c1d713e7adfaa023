"""Who owns which token and where it lies, against dealing the tokens out one by one."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.context_shard import (
    ContextShard,
    allowed_context_parallel_sizes,
    check_context_parallel_size,
)
from mini_engine.errors import ConfigError


def dealt(length: int, size: int, interleave: int) -> list[list[int]]:
    """Positions of each rank: cards dealt `interleave` at a time."""
    hands: list[list[int]] = [[] for _ in range(size)]
    rank, given_out = 0, 0
    for position in range(length):
        hands[rank].append(position)
        given_out += 1
        if given_out == interleave:
            rank, given_out = (rank + 1) % size, 0
    return hands


SIZES = [(1, 1, 4), (2, 1, 4), (3, 1, 1), (4, 2, 4), (8, 4, 4), (2, 4, 16), (5, 3, 6)]  # N, I, B


@pytest.mark.parametrize("size, interleave, block_size", SIZES)
def test_tokens_are_dealt_out_like_cards(size, interleave, block_size):
    longest = 3 * size * block_size + 1
    shards = [ContextShard(rank, size, interleave) for rank in range(size)]
    hands = dealt(longest, size, interleave)
    for shard, hand in zip(shards, hands, strict=True):
        assert [p for p in range(longest) if shard.owns(p)] == hand
        assert [shard.global_position(k) for k in range(len(hand))] == hand
        assert [shard.local_position(p) for p in hand] == list(range(len(hand)))
    for length in range(longest + 1):
        assert [shard.local_length(length) for shard in shards] == [
            len(hand) for hand in dealt(length, size, interleave)
        ]


@pytest.mark.parametrize("size, interleave, block_size", SIZES)
def test_a_ranks_own_tokens_lie_one_after_the_other(size, interleave, block_size):
    """The invariant: k-th own token at table[k // B] * B + k % B, every slot once, all others -1."""
    length = 2 * size * block_size + block_size + 1
    table = np.random.default_rng(0).permutation(20)[: -(-length // (size * block_size))] + 1
    for rank, hand in enumerate(dealt(length, size, interleave)):
        slots = ContextShard(rank, size, interleave).slot_mapping(np.arange(length), table, block_size)
        assert slots[hand].tolist() == [table[k // block_size] * block_size + k % block_size for k in range(len(hand))]
        assert (np.delete(slots, hand) == -1).all()


def test_slots_of_several_sequences_use_their_own_rows():
    table = np.array([[5, 6], [5, 6], [7, 8]], np.int32)
    slots = ContextShard(1, 2).slot_mapping(np.array([3, 9, 9]), table, 4)
    assert slots.tolist() == [5 * 4 + 1, 6 * 4, 8 * 4] and slots.dtype == np.int64


def test_one_rank_is_the_identity():
    one, table = ContextShard(), np.array([3, 9, 4])
    positions = np.arange(12)
    assert one.slot_mapping(positions, table, 4).tolist() == (table.repeat(4) * 4 + positions % 4).tolist()
    assert [one.local_length(n) for n in range(5)] == [0, 1, 2, 3, 4] and one.virtual_block_size(16) == 16


@pytest.mark.parametrize("size, blocks", [(1, 13), (2, 7), (4, 4)])  # 50 tokens in blocks of 4
def test_blocks_of_a_sequence(size, blocks):
    assert ContextShard(0, size).blocks_for(50, 4) == blocks


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 400))
def test_ranks_share_a_sequence_evenly_and_completely(size, interleave, length):
    parts = [ContextShard(rank, size, interleave).local_length(length) for rank in range(size)]
    assert sum(parts) == length and parts == sorted(parts, reverse=True) and parts[0] - parts[-1] <= interleave


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: ContextShard(2, 2), "rank 2 is not in a group of 2"),
        (lambda: ContextShard(-1, 2), "rank -1"),
        (lambda: ContextShard(0, 0), "at least 1 rank"),
        (lambda: ContextShard(0, 2, 0), "1 token in a run"),
        (lambda: ContextShard(0, 2, 3).virtual_block_size(16), "3 must divide block_size 16.*1, 2, 4, 8, 16"),
        (lambda: ContextShard(0, 2, 8).blocks_for(5, 4), "8 must divide block_size 4"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "heads, kv_heads, tp, sizes",
    [
        (64, 4, 8, (1, 2)),  # Qwen3-235B, the post's example
        (64, 4, 4, (1,)),
        (64, 4, 16, (1, 2, 4)),
        (64, 1, 8, (1, 2, 4, 8)),  # MLA
        (12, 3, 6, (1, 2)),  # SmolLM2 with its heads padded
        (12, 3, 12, (1, 2, 4)),
        (12, 2, 6, (1, 3)),
        (9, 3, 6, ()),
        (24, 3, 8, (1,)),
    ],
)
def test_allowed_sizes(heads, kv_heads, tp, sizes):
    assert allowed_context_parallel_sizes(tp, heads, kv_heads) == sizes
    for size in sizes:
        check_context_parallel_size(tp, size, heads, kv_heads)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("heads", [8, 12, 24])
def test_a_size_is_allowed_exactly_where_every_group_holds_one_kv_head_and_every_head_as_many_ranks(heads, kv_heads):
    """The reason for the rules, by laying the heads out on the ranks."""
    if heads % kv_heads:
        return
    for tp in range(1, heads + 1):
        good = []
        for size in range(1, tp + 1):
            own = heads // tp
            held = [{h * kv_heads // heads for h in range(r * own, (r + 1) * own)} for r in range(tp)]
            groups = [set().union(*held[first : first + size]) for first in range(0, tp, size)]
            even = heads % tp == 0 and tp % size == 0
            copies = [sum(k in part for part in held) for k in range(kv_heads)]
            if size == 1:
                fits = even
            else:
                fits = even and all(len(g) == 1 for g in groups) and all(n % size == 0 for n in copies)
            if fits:
                good.append(size)
        assert allowed_context_parallel_sizes(tp, heads, kv_heads) == tuple(good), tp


@pytest.mark.parametrize(
    "tp, size, heads, kv_heads, says",
    [
        (6, 2, 12, 2, "3 copies of each KV head .6 ranks / 2 KV heads.*mix KV heads.*at tensor_parallel_size 6: 1, 3"),
        (8, 4, 64, 4, "must divide the 2 copies.*at tensor_parallel_size 8: 1, 2"),
        (8, 2, 32, 8, "no copies to replace.*tensor_parallel_size 16, 32"),
        (6, 4, 12, 1, "must divide tensor_parallel_size 6.*1, 2, 3, 6"),
        (6, 2, 9, 3, "6 must divide the 9 query heads.*size 1 at any"),
        (8, 2, 24, 3, "8 must be a multiple of the 3 KV heads.*tensor_parallel_size 6, 12, 24"),
        (4, 0, 8, 1, "at least 1"),
    ],
)
def test_a_refusal_names_the_rule_the_numbers_and_what_works(tp, size, heads, kv_heads, says):
    with pytest.raises(ConfigError, match=f"decode_context_parallel_size {size}: .*{says}"):
        check_context_parallel_size(tp, size, heads, kv_heads)


def test_the_arithmetic_needs_no_torch():
    script = "import sys, mini_engine.context_shard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
