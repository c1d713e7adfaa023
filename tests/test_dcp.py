"""Attention over a context cut across ranks equals attention over all of it, and moves the bytes that formulas say.

Sharp scores with long contexts, and contexts too short for every rank, are both needed: a base-2 lse taken for a
natural one is invisible in short ones, an empty shard taken for lse 0 in long ones.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch

from mini_engine.analysis.dcp import exchange_bytes, exchange_collectives
from mini_engine.attention import AttentionState, attend, merge
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import (
    CommBackend,
    combine,
    combine_a2a,
    combine_ag_rs,
    context_parallel_attention,
    gather_context,
    merge_parts,
    merge_weights,
)
from mini_engine.groups import Group, GroupError, LocalGroup, run_ranks
from tests.dcp_cases import MLA, QWEN3_8B_LIKE, SMOLLM2_PADDED, TINY, Case, Shape, Step, run_rank

EMPTY = -math.inf
WAYS = list(product(("ag_rs", "a2a"), (False, True)))


def assert_same(a: AttentionState, b: AttentionState, tolerance: float = 2e-5) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def attention_of_all_heads(
    case: Case, size: int, interleave: int, comm: CommBackend, q_replicate: bool
) -> tuple[AttentionState, list[LocalGroup]]:
    """Every KV head's context group in turn, heads put together in order."""
    step = Step(case)
    states: list[AttentionState] = []
    groups: list[LocalGroup] = []
    for kv_head in range(case.shape.kv_heads):
        groups = LocalGroup.create(size)
        states += run_ranks(groups, partial(_rank, step, kv_head, interleave, comm, q_replicate))
    whole = AttentionState(torch.cat([s.out for s in states], 1), torch.cat([s.lse for s in states], 1))
    return whole, groups


def _rank(
    step: Step, kv_head: int, interleave: int, comm: CommBackend, replicate: bool, group: Group
) -> AttentionState:
    return run_rank(step, group, kv_head, interleave, comm, replicate)


def lengths_at_edges(size: int, block_size: int) -> tuple[int, ...]:
    """Around nothing, the number of ranks, a block, a virtual block."""
    virtual = size * block_size
    edges = {0, 1, size - 1, size, size + 1, block_size, block_size + 1, virtual - 1, virtual, virtual + 1, 2 * virtual}
    return tuple(sorted(edges))


@pytest.mark.parametrize("comm, q_replicate", WAYS)
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [TINY, MLA])
def test_decodes_at_every_edge(shape: Shape, size, interleave, comm, q_replicate):
    contexts = lengths_at_edges(size, 4)
    case = Case(shape, contexts, new=(1,) * len(contexts), sharpness=3.0)
    assert_same(attention_of_all_heads(case, size, interleave, comm, q_replicate)[0], Step(case).whole())


@pytest.mark.parametrize("comm, q_replicate", WAYS)
@pytest.mark.parametrize("shape, size", [(SMOLLM2_PADDED, 2), (SMOLLM2_PADDED, 4), (QWEN3_8B_LIKE, 2)])
def test_models_heads(shape: Shape, size, comm, q_replicate):
    case = Case(shape, (0, 3, 130, 257), new=(1, 1, 1, 1), block_size=16, sharpness=2.0)
    assert_same(attention_of_all_heads(case, size, 4, comm, q_replicate)[0], Step(case).whole())


def test_padded_heads_leave_the_real_ones_alone():
    """SmolLM2's 9 heads among 12: the same 9 as without padding."""
    step = Step(Case(SMOLLM2_PADDED, (100,), (1,)))
    real = [h for h in range(12) if h % 4 < 3]
    nine = Shape(9, 3, 64, 64)
    plain = Step(Case(nine, (100,), (1,)))
    plain.q, plain.k, plain.v = step.q[:, real], step.k, step.v
    state = attention_of_all_heads(step.case, 4, 1, "a2a", False)[0]
    assert_same(AttentionState(state.out[:, real], state.lse[:, real]), plain.whole())


@pytest.mark.parametrize("comm, q_replicate", WAYS)
@pytest.mark.parametrize("size, interleave", [(2, 1), (4, 4)])
def test_chunks_and_decodes_together(size, interleave, comm, q_replicate):
    """Decodes, a chunk after a context, a first chunk, and chunks that end past a block."""
    case = Case(TINY, (5, 0, 33, 16, 1), new=(1, 6, 7, 4, 1), sharpness=2.0)
    assert_same(attention_of_all_heads(case, size, interleave, comm, q_replicate)[0], Step(case).whole())


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_bfloat16_travels_and_sums_are_float32(comm):
    case = Case(TINY, (40, 2), (1, 1), dtype=torch.bfloat16)
    got = attention_of_all_heads(case, 4, 1, comm, False)[0]
    assert got.out.dtype == torch.float32
    assert_same(got, Step(case).whole(), tolerance=2e-2)  # what travelled was rounded once, to 8 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("comm, q_replicate", WAYS)
@pytest.mark.parametrize("shape, size", [(TINY, 2), (TINY, 8), (MLA, 4), (QWEN3_8B_LIKE, 4)])
@pytest.mark.parametrize("contexts", [(9, 70), (200, 3)])
def test_bytes_on_the_wire_are_the_formula(shape: Shape, size, comm, q_replicate, dtype, contexts):
    case = Case(shape, contexts, (1, 1), dtype=dtype)
    _, groups = attention_of_all_heads(case, size, 1, comm, q_replicate)
    heads = shape.heads // shape.kv_heads
    expected = exchange_bytes(
        comm, q_replicate, size, 2, heads, shape.key_dim, shape.value_dim, element_bytes=dtype.itemsize
    )
    for group in groups:
        assert group.num_bytes == expected
        assert len(group.records) == exchange_collectives(comm, q_replicate)


@pytest.mark.parametrize("length", [0, 1, 3, 16, 17, 41])
@pytest.mark.parametrize("size, interleave", [(1, 1), (2, 1), (4, 4), (8, 1)])
def test_a_gathered_context_serves_a_chunk_as_well(size, interleave, length):
    """Every rank attends with its own heads to all of the context; no result has to be combined."""
    step = Step(Case(TINY, (length,), (5,)))

    def work(group):
        shard, own = ContextShard(group.rank, size, interleave), 8 // size
        heads = slice(group.rank * own, (group.rank + 1) * own)
        k_cache, v_cache, table = step.shard(shard, 0)
        k, v = (gather_context(cache, table[0], length, shard, group) for cache in (k_cache, v_cache))
        state = attend(step.q[:, heads].transpose(0, 1), k, v, step.scale)
        seen = AttentionState(state.out.transpose(0, 1), state.lse.transpose(0, 1))
        return merge(seen, step.new_tokens(heads, slice(0, 1)))

    groups = LocalGroup.create(size)
    states = run_ranks(groups, work)
    whole = AttentionState(torch.cat([s.out for s in states], 1), torch.cat([s.lse for s in states], 1))
    assert_same(whole, step.whole())
    longest = ContextShard(0, size, interleave).local_length(length)
    assert [group.num_bytes for group in groups] == [(size - 1) * longest * (4 + 4) * 4] * size


def test_no_collective_where_nobody_has_context():
    """And one where only some rank has: all decide alike, by whole lengths."""
    for contexts, count in (((0, 0), 0), ((0, 1), 3)):
        _, groups = attention_of_all_heads(Case(TINY, contexts, (2, 1)), 4, 1, "ag_rs", False)
        assert [len(group.records) for group in groups] == [count] * 4


@pytest.mark.parametrize("comm", [combine_ag_rs, combine_a2a])
def test_the_merge_done_by_hand(comm):
    """Values [2, 4] and [6, 8] with lse 1 and 2 weigh .2689 and .7311, for both heads."""
    outs, lses = torch.tensor([[2.0, 4.0], [6.0, 8.0]]), [1.0, 2.0]

    def work(group):
        out = outs[group.rank].expand(1, 2, 2)
        return comm(AttentionState(out, torch.full((1, 2), lses[group.rank])), group)

    for state in run_ranks(LocalGroup.create(2), work):
        assert state.out[0, 0].tolist() == pytest.approx([0.2689 * 2 + 0.7311 * 6, 0.2689 * 4 + 0.7311 * 8], abs=5e-4)
        assert state.lse.item() == pytest.approx(math.log(math.e + math.e**2))


@pytest.mark.parametrize("comm", [combine_ag_rs, combine_a2a])
@pytest.mark.parametrize("bad", [EMPTY, math.inf, math.nan])
def test_a_part_without_tokens_counts_for_nothing_whatever_its_memory_holds(comm, bad):
    def work(group):
        out, lse = torch.ones(1, 2, 3), torch.full((1, 2), -5.0)
        if group.rank == 1:
            out, lse = torch.full((1, 2, 3), math.nan), torch.full((1, 2), bad)
        return comm(AttentionState(out, lse), group)

    for state in run_ranks(LocalGroup.create(2), work):
        assert torch.equal(state.out, torch.ones(1, 1, 3)) and state.lse.item() == pytest.approx(-5)


@pytest.mark.parametrize("comm", [combine_ag_rs, combine_a2a])
def test_all_parts_empty_are_the_empty_state(comm):
    def work(group):
        return comm(AttentionState(torch.full((1, 2, 3), math.nan), torch.full((1, 2), EMPTY)), group)

    for state in run_ranks(LocalGroup.create(2), work):
        assert torch.equal(state.out, torch.zeros(1, 1, 3)) and state.lse.item() == EMPTY


def test_many_parts_merge_as_pairs_do():
    random = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(5, 3, 2, 4, generator=random), 20 * torch.randn(5, 3, 2, generator=random)
    lses[1, 0], lses[:, 2, 1] = EMPTY, EMPTY
    pairs = AttentionState(outs[0], lses[0])
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        pairs = merge(pairs, AttentionState(out, lse))
    assert_same(merge_parts(outs, lses), pairs)
    shares, total = merge_weights(lses)
    assert torch.allclose(shares.sum(0), torch.where(torch.isneginf(total), 0.0, 1.0))


def test_large_lse_does_not_overflow():
    state = merge_parts(torch.tensor([[[[1.0]]], [[[3.0]]]]), torch.full((2, 1, 1), 40_000.0))
    assert state.out.item() == 2 and state.lse.item() == pytest.approx(40_000 + math.log(2))


def test_one_rank_returns_its_state_untouched():
    state = AttentionState(torch.randn(2, 4, 3), torch.randn(2, 4))
    assert combine(state, LocalGroup.create(1)[0], "a2a", torch.bfloat16) is state


def test_a_shard_of_another_group_is_refused():
    state = attend(torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 1, 2), 1.0)
    cache, table = torch.zeros(2, 4, 1, 2), torch.ones(1, 1)
    with pytest.raises(GroupError, match="shard is 0 of 2, the group's rank 0 of 1"):
        context_parallel_attention(
            torch.ones(1, 1, 2), state, cache, cache, table, [1], [1], ContextShard(0, 2), 1.0, LocalGroup.create(1)[0]
        )


def test_heads_that_cannot_be_dealt_out_are_refused():
    state = AttentionState(torch.zeros(1, 3, 2), torch.zeros(1, 3))
    for comm in (combine_ag_rs, combine_a2a):
        with pytest.raises(GroupError, match="3 .* to 2 ranks"):
            run_ranks(LocalGroup.create(2), lambda g, c=comm: c(state, g))
