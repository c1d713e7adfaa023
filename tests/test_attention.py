"""`attend`, `merge` and the torch backend against the formula in float64, with rubbish wherever nobody may look."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention import AttentionState, TorchAttention, attend, merge, paged_attention_reference
from mini_engine.batch import Batch, build_batch
from mini_engine.scheduler import ScheduledSequence, SchedulerOutput
from tests.scheduling import sequence

EMPTY = float("-inf")


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor) -> AttentionState:
    """One query after the other, one key after the other, in float64. q [M, D], k and v [L, D], visible [M, L]."""
    outs, lses = [], []
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if visible[i, j]]
        scores = [float(q[i].double() @ k[j].double()) * scale for j in keys]
        total = sum(math.exp(score) for score in scores)
        out = torch.zeros(v.shape[-1], dtype=torch.float64)
        for j, score in zip(keys, scores, strict=True):
            out += math.exp(score) / total * v[j].double()
        outs.append(out)
        lses.append(math.log(total) if keys else EMPTY)
    return AttentionState(torch.stack(outs), torch.tensor(lses, dtype=torch.float64))


def assert_same(a: AttentionState, b: AttentionState, tolerance: float = 1e-5) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("queries, keys, dim", [(1, 1, 4), (3, 7, 8), (5, 2, 16)])
def test_attend_is_the_formula(queries, keys, dim):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, dim, generator=generator) for n in (queries, keys, keys))
    visible = torch.rand(queries, keys, generator=generator) < 0.6
    visible[0] = False
    assert_same(attend(q, k, v, 0.3, visible), formula(q, k, v, 0.3, visible))
    assert_same(attend(q, k, v, 0.3), formula(q, k, v, 0.3, torch.ones_like(visible)))


def test_attend_over_nothing_is_the_empty_state():
    q, nothing = torch.randn(2, 4), torch.randn(0, 4)
    for state in (
        attend(q, nothing, nothing, 1.0),
        attend(q, torch.full((3, 4), math.nan), torch.full((3, 4), math.nan), 1.0, torch.zeros(2, 3, dtype=torch.bool)),
    ):
        assert torch.equal(state.out, torch.zeros(2, 4)) and torch.equal(state.lse, torch.full((2,), EMPTY))


def test_attend_does_not_look_at_hidden_slots():
    q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 4)
    visible = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]).bool()
    expected = attend(q, k, v, 1.0, visible)
    k[3:], v[3:] = math.nan, math.inf
    assert_same(attend(q, k, v, 1.0, visible), expected, 0)


def test_attend_with_large_scores_does_not_overflow():
    q, k, v = torch.full((1, 4), 100.0), torch.full((3, 4), 100.0), torch.arange(12.0).view(3, 4)
    state = attend(q, k, v, 1.0)
    assert_same(state, AttentionState(v.mean(0, keepdim=True), torch.tensor([40_000 + math.log(3)])))


def split_states(seed: int, lengths: list[int], spread: float) -> tuple[list[AttentionState], AttentionState]:
    """States over disjoint runs of keys, some of them empty, and the state over all keys."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (torch.randn(n, 8, generator=generator) for n in (3, total, total))
    k *= spread
    parts = [attend(q, *x, 0.5) for x in zip(k.split(lengths), v.split(lengths), strict=True)]
    return parts, attend(q.double(), k.double(), v.double(), 0.5) if total else attend(q, k, v, 0.5)


@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_merge_is_associative_and_gives_the_whole(seed, lengths, spread):
    (a, b, c), whole = split_states(seed, lengths, spread)
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert_same(left, right)
    assert_same(left, whole, 1e-4)
    assert_same(merge(a, b), merge(b, a), 1e-6)


def empty_state(out: float, lse: float) -> AttentionState:
    return AttentionState(torch.full((3, 8), out), torch.full((3,), lse))


@pytest.mark.parametrize("out", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("lse", [EMPTY, math.nan, math.inf])
def test_what_counts_as_empty_is_neutral(out, lse):
    (state, *_), _ = split_states(1, [4, 0, 0], 1.0)
    nothing = empty_state(out, lse)
    for merged in (merge(state, nothing), merge(nothing, state)):
        assert torch.equal(merged.out, state.out) and torch.equal(merged.lse, state.lse)
    both = merge(nothing, nothing)
    assert torch.equal(both.out, torch.zeros(3, 8)) and torch.equal(both.lse, torch.full((3,), EMPTY))


def test_merge_of_far_apart_states_keeps_the_larger():
    a = AttentionState(torch.ones(1, 2), torch.tensor([1e4]))
    b = AttentionState(-torch.ones(1, 2), torch.tensor([-1e4]))
    assert_same(merge(a, b), a, 0)
    assert_same(merge(b, a), a, 0)


def make_batch(
    context_and_new: list[tuple[int, int]], block_size: int, generator: torch.Generator
) -> tuple[Batch, int]:
    """A ragged batch with shuffled block ids; returns also the size of the pool.

    Every sequence owns one block more than it fills, as one does whose prompt is computed in chunks.
    """
    counts = [-(-(context + new) // block_size) + 1 for context, new in context_and_new]
    ids = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
    items, first = [], 0
    for i, (context, new) in enumerate(context_and_new):
        seq = sequence(str(i), range(context + new))
        seq.block_table = ids[first : first + counts[i]]
        first += counts[i]
        items.append(ScheduledSequence(seq, context, new))
    output = SchedulerOutput(tuple(items), tuple((item.seq, i) for i, item in enumerate(items)), (), ())
    return build_batch(output, block_size), len(ids) + 1


def filled_caches(
    batch: Batch, num_blocks: int, block_size: int, kv_heads: int, dim: int, generator: torch.Generator, unused: float
) -> list[torch.Tensor]:
    """K and V with numbers where the batch has tokens and `unused` everywhere else, but for the null block's zeros."""
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks, block_size, kv_heads, dim), unused)
        cache[0] = 0
        for row, length in enumerate(batch.seq_lens.tolist()):
            for position in range(length):
                block = int(batch.block_table[row, position // block_size])
                cache[block, position % block_size] = torch.randn(kv_heads, dim, generator=generator)
        caches.append(cache)
    return caches


def setting(lens: list[tuple[int, int]], block: int, kv_heads: int, group: int, dim: int, unused: float) -> Any:
    generator = torch.Generator().manual_seed(len(lens) + block + group + dim)
    batch, num_blocks = make_batch(lens, block, generator)
    caches = filled_caches(batch, num_blocks, block, kv_heads, dim, generator, unused)
    q = torch.randn(len(batch.input_ids), kv_heads * group, dim, generator=generator)
    return batch, q, caches


MIXED = [(6, 1), (0, 1), (15, 1), (0, 5), (4, 9), (16, 16), (3, 1), (30, 2)]
ONE_KIND = {
    "mixed": MIXED,
    "decodes": [(6, 1), (31, 1), (0, 1), (16, 1)],
    "decodes-of-one-length": [(15, 1), (15, 1)],
    "decodes-of-one-length-in-a-started-block": [(5, 1), (5, 1)],
    "one-decode": [(20, 1)],
    "one-prefill": [(0, 21)],
    "one-chunk": [(16, 21)],
}


@pytest.mark.parametrize("unused", [0.0, math.nan, math.inf], ids=["zeros", "nan", "inf"])
@pytest.mark.parametrize("lens", ONE_KIND.values(), ids=ONE_KIND)
def test_reference_is_the_formula(lens, unused):
    group, block, dim = 2, 4, 8
    batch, q, (k, v) = setting(lens, block, 2, group, dim, unused)
    state = paged_attention_reference(q, k, v, batch, 0.4)
    first = 0
    for row, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        table = batch.block_table[row]
        own_k, own_v = (
            torch.stack([cache[table[p // block], p % block] for p in range(context + new)]) for cache in (k, v)
        )
        visible = torch.ones(new, context + new).tril(context).bool()
        for head in range(q.shape[1]):
            expected = formula(
                q[first : first + new, head], own_k[:, head // group], own_v[:, head // group], 0.4, visible
            )
            rows = slice(first, first + new)
            assert_same(AttentionState(state.out[rows, head], state.lse[rows, head]), expected)
        first += new


@pytest.mark.parametrize("unused", [0.0, math.nan, math.inf], ids=["zeros", "nan", "inf"])
@pytest.mark.parametrize("lens", ONE_KIND.values(), ids=ONE_KIND)
@pytest.mark.parametrize("block", [1, 4, 16])
def test_torch_backend(lens, block, unused):
    batch, q, (k, v) = setting(lens, block, 2, 3, 16, unused)
    state = TorchAttention(batch, block, 0.25)(q, k, v)
    assert state.out.dtype == state.lse.dtype == torch.float32
    assert_same(state, paged_attention_reference(q, k, v, batch, 0.25))


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_torch_backend_shapes(group, dim):
    batch, q, (k, v) = setting(MIXED, 16, 2, group, dim, math.nan)
    assert_same(TorchAttention(batch, 16, dim**-0.5)(q, k, v), paged_attention_reference(q, k, v, batch, dim**-0.5))


@pytest.mark.parametrize("kv_heads, group, dim", [(1, 4, 64), (2, 3, 80), (8, 1, 128)])
def test_torch_backend_in_bfloat16(kv_heads, group, dim):
    batch, q, (k, v) = setting(MIXED, 16, kv_heads, group, dim, math.nan)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    state = TorchAttention(batch, 16, dim**-0.5)(q, k, v)
    assert state.out.dtype == torch.float32
    # bf16 keeps 8 bits: its steps near 1 are 2^-7 apart
    assert_same(state, paged_attention_reference(q, k, v, batch, dim**-0.5), 2e-2)


def test_torch_backend_with_a_cache_of_another_dtype():
    batch, q, (k, v) = setting(MIXED, 16, 2, 3, 64, math.nan)
    k, v = k.bfloat16(), v.bfloat16()
    assert_same(TorchAttention(batch, 16, 0.125)(q, k, v), paged_attention_reference(q, k, v, batch, 0.125))


def test_torch_backend_leaves_the_cache_alone():
    batch, q, (k, v) = setting(MIXED, 16, 2, 3, 64, 5.0)
    before = k.clone(), v.clone()
    TorchAttention(batch, 16, 0.125)(q, k, v)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_the_formula_of_other_devices_is_tested_here_too(monkeypatch):
    """Off the CPU the backend uses `attend`; the same packing and masks are driven through it."""
    import mini_engine.attention as module

    def formula_only(q, k, v, scale, causal=False, mask=None):
        visible = None if mask is None else mask == 0
        if causal:
            visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return attend(q, k, v, scale, visible)

    monkeypatch.setattr(module, "_softmax_attention", formula_only)
    batch, q, (k, v) = setting(MIXED, 16, 2, 3, 64, math.nan)
    assert_same(TorchAttention(batch, 16, 0.125)(q, k, v), paged_attention_reference(q, k, v, batch, 0.125))


@pytest.mark.gpu
@pytest.mark.parametrize("lens", ONE_KIND.values(), ids=ONE_KIND)
def test_torch_backend_on_a_gpu(lens):
    device = torch.device("cuda")
    batch, q, (k, v) = setting(lens, 16, 2, 3, 64, math.nan)
    expected = paged_attention_reference(q, k, v, batch, 0.125)
    state = TorchAttention(batch.to(device), 16, 0.125)(q.to(device), k.to(device), v.to(device))
    assert_same(AttentionState(state.out.cpu(), state.lse.cpu()), expected, 1e-4)
