"""Slots and branches against blocks written down one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    QWEN3_8B,
    AnalysisError,
    Branches,
    MiB,
    forked_branches,
    group_blocks,
    group_kv_bytes,
    paged_slots,
    prefix_branches,
    reserved_slots,
    saved_by_a_longer_prefix,
    shared_slots,
    slot_of,
    table_entries,
    tail_waste,
    unused_slots,
)

LENGTHS = (9, 13, 5, 15)


@pytest.mark.parametrize(
    "block, wastes, entries",  # exercise 8-3: each sequence's, and all entries
    [(2, (1, 1, 1, 1), 23), (4, (3, 3, 3, 1), 13), (8, (7, 3, 3, 1), 7), (1, (0, 0, 0, 0), 42), (16, (7, 3, 11, 1), 4)],
)
def test_exercise_8_3(block: int, wastes: tuple[int, ...], entries: int) -> None:
    assert tuple(tail_waste(length, block) for length in LENGTHS) == wastes
    assert (unused_slots(LENGTHS, block), table_entries(LENGTHS, block)) == (sum(wastes), entries)


@given(lengths=st.lists(st.integers(0, 50), max_size=5), block=st.integers(1, 9))
def test_paging_by_hand(lengths: list[int], block: int) -> None:
    written = {(i, position // block) for i, length in enumerate(lengths) for position in range(length)}
    assert table_entries(lengths, block) == len(written)
    assert paged_slots(lengths, block) == len(written) * block
    assert unused_slots(lengths, block) == len(written) * block - sum(lengths)
    assert all(tail_waste(length, block) < block for length in lengths)


@given(prefix=st.integers(0, 20), extra=st.lists(st.integers(0, 20), min_size=1, max_size=5), block=st.integers(1, 7))
def test_sharing_by_hand(prefix: int, extra: list[int], block: int) -> None:
    lengths = [prefix + more for more in extra]
    sharers = len(lengths) // 2 + 1
    written = set()
    for i, length in enumerate(lengths):
        for position in range(length):
            whole = (position // block + 1) * block <= prefix
            written.add((-1 if whole and i < sharers else i, position // block))
    assert shared_slots(lengths, block, sharers, prefix) == len(written) * block


def test_what_paging_and_sharing_save() -> None:
    assert [reserved_slots(LENGTHS, 16), paged_slots(LENGTHS, 4), shared_slots(LENGTHS, 4, 2, 8)] == [64, 52, 44]
    assert [reserved_slots(LENGTHS, 16) - sum(LENGTHS), unused_slots(LENGTHS, 4)] == [22, 10]


@pytest.mark.parametrize("position, slot", [(0, 8), (3, 11), (4, 0), (7, 3), (8, 12), (11, 15)])
def test_the_table_of_figure_8_10(position: int, slot: int) -> None:
    """Logical 0, 1, 2 lie in physical 2, 0, 3; blocks of 4."""
    assert slot_of(position, (2, 0, 3), 4) == slot


def test_the_four_branches_both_ways() -> None:
    found, forked = prefix_branches(4, 1536, 128), forked_branches(4, 1536, 128)
    assert (found.shared, found.own, found.references, found.physical, found.tails) == (95, 9, 416, 131, 36)
    assert (forked.shared, forked.own, forked.references, forked.physical) == (96, 8, 416, 128)
    assert found.saved == pytest.approx(0.685, abs=5e-4)
    assert found.physical == group_blocks(4, 1536, 128, shared_prefix=1536)


def test_forks_of_a_started_tail_copy_it() -> None:
    """5 tokens and 4 more computed in blocks of 4: the full block is shared; of the tail everyone has a version."""
    assert forked_branches(3, 5, 5, 4) == Branches(3, shared=1, own=2)
    assert forked_branches(3, 5, 1, 4) == Branches(3, shared=2, own=0)  # nobody writes, nobody copies


@given(requests=st.integers(1, 40), blocks=st.integers(0, 5))
def test_a_block_moved_into_the_prefix_saves_all_but_one(requests: int, blocks: int) -> None:
    before = Branches(requests, shared=10, own=20)
    after = Branches(requests, shared=10 + blocks, own=20 - blocks)
    assert before.physical - after.physical == saved_by_a_longer_prefix(requests, blocks)


@pytest.mark.parametrize("requests", [1, 8, 16, 32, 35])
def test_long_requests_take_864_and_324_each(requests: int) -> None:
    assert group_kv_bytes(QWEN3_8B, requests, 8192, 256, shared_prefix=6144) == (864 + 324 * requests) * MiB


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: reserved_slots((17,), 16), "17 tokens does not fit the 16"),
        (lambda: slot_of(12, (2, 0, 3), 4), "position 12 is in logical block 3, of which the table has 3"),
        (lambda: shared_slots((9, 7), 4, 2, 8), "cannot share 8 tokens: the lengths are 9, 7"),
        (lambda: shared_slots((9,), 4, 2, 8), "2 sequences cannot share"),
        (lambda: table_entries((4,), 0), "block_size must be a whole number of at least 1, got 0"),
        (lambda: Branches(0, 1, 1), "count must be"),
    ],
)
def test_what_cannot_be_is_refused(call, says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        call()
