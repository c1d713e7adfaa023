"""Paged attention against the torch reference: (out, lse) of every token, over a pool that is NaN where it may be."""

from __future__ import annotations

import pytest
import torch

import mini_engine.kernels.paged_attention as module
from mini_engine.attention import AttentionState
from mini_engine.kernels.checks import KernelInputError
from mini_engine.kernels.paged_attention import paged_attention
from mini_engine.kernels.tiles import SHORT_QUERY, SPLIT_SIZE, TileConfig, tile_config
from mini_engine.triton_attention import TritonAttention, split_runs
from tests.kernels.paged import TOLERANCE, Paged, make_paged

SMALL_TILES = TileConfig(block_m=16, tile=16, split_size=32, num_warps=4, num_stages=2)
CHUNK_TILES = TileConfig(block_m=32, tile=32, split_size=0, num_warps=4, num_stages=2)


def attention(case: Paged, config: TileConfig | None = None) -> AttentionState:
    batch = case.batch
    return paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        case.scale,
        batch.max_query_len,
        batch.max_seq_len,
        config=config,
    )


def assert_same(got: AttentionState, want: AttentionState, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.out.float(), want.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(got.lse, want.lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "seq_lens",
    [
        (1, 15, 16, 17, 31, 32, 33),  # around the edges of blocks (16) and tiles (32)
        (SPLIT_SIZE - 1, SPLIT_SIZE, SPLIT_SIZE + 1),
        (2 * SPLIT_SIZE + 1, 5),  # two of the three splits of the second sequence are empty
    ],
)
def test_decode(seq_lens, device):
    case = make_paged((1,) * len(seq_lens), tuple(length - 1 for length in seq_lens), device)
    assert_same(attention(case), case.reference, torch.float32)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_groups_and_head_sizes(group, dim, device):
    """Decode, verify and a chunk of a prompt in one launch; rows of a tile that belong to no query are padding."""
    case = make_paged((1, 5, 11), (18, 30, 6), device, group=group, kv_heads=2, dim=dim)
    assert_same(attention(case, CHUNK_TILES), case.reference, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query_lens, contexts", [((1, 1), (40, 299)), ((20, 3), (30, 0))])
def test_half_precision(dtype, query_lens, contexts, device):
    case = make_paged(query_lens, contexts, device, dtype=dtype)
    assert_same(attention(case), case.reference, dtype)


def test_cache_narrower_than_the_model(device):
    case = make_paged((1, 3), (40, 20), device)
    k_cache, v_cache = case.k_cache.bfloat16(), case.v_cache.bfloat16()
    case = Paged(case.q, k_cache, v_cache, case.batch, case.scale)
    assert_same(attention(case), case.reference, torch.float32)


@pytest.mark.parametrize("block_size", [1, 4, 12, 32, 128])
def test_block_sizes(block_size, device):
    case = make_paged((1, 6, 1), (70, 33, 0), device, block_size=block_size, group=3)
    assert_same(attention(case, SMALL_TILES), case.reference, torch.float32)


@pytest.mark.parametrize("context", [23, 24, 28, 31, 32, 58, 60, 64])
def test_verify_across_a_split_edge(context, device):
    """Of 8 new tokens some see nothing of the last split (32 keys): their part of it must be empty, not zero."""
    case = make_paged((8,), (context,), device, group=2)
    assert_same(attention(case, SMALL_TILES), case.reference, torch.float32)


def test_queries_that_see_nothing_of_a_split(device, monkeypatch):
    """Of 8 new tokens from position 28 on, 4 see nothing of the second split: their state in it is (0, -inf)."""
    parts = []
    monkeypatch.setattr(module, "merge_states", lambda *states: parts.append(states[:2]) or AttentionState(*states[2:]))
    attention(make_paged((8,), (28,), device, group=2), SMALL_TILES)
    out, lse = parts[0]
    assert torch.equal(out[1, :4], torch.zeros_like(out[1, :4]))
    assert torch.equal(lse[1, :4], torch.full_like(lse[1, :4], float("-inf")))
    assert torch.isfinite(out[1, 4:]).all() and torch.isfinite(lse[1, 4:]).all()


@pytest.mark.parametrize("group", [3, 7])
def test_every_output_is_written_by_one_program(group, stored):
    """Padding rows of a tile must not write: on a GPU the next tile may have written that row already."""
    case = make_paged((1, 12, 1), (20, 9, 40), torch.device("cpu"), group=group, dim=80)
    for config in (SMALL_TILES, CHUNK_TILES):
        stored.clear()
        attention(case, config)
        addresses = torch.cat([torch.from_numpy(item.astype("int64")) for item in stored])
        assert len(addresses) and len(addresses) == len(addresses.unique())


@pytest.mark.parametrize("dim", [64, 256])
def test_default_tiles_of_a_long_chunk(dim, device):
    case = make_paged((70,), (0,), device, dim=dim)
    assert_same(attention(case), case.reference, torch.float32)


def test_mixed_batch_through_the_backend(device):
    """Decode and verify (short), a chunk (long), and decode again: three launches of one batch."""
    case = make_paged((1, 5, 40, 1), (300, 20, 33, 15), device, kv_heads=2)
    assert_same(
        TritonAttention(case.batch, case.scale)(case.q, case.k_cache, case.v_cache), case.reference, torch.float32
    )


def test_result_does_not_depend_on_batch_mates(device):
    """To the bit: neither on the number of splits that a longer neighbour brings, nor on a chunk beside it."""
    case = make_paged((1, 1, 40), (20, 600, 0), device)
    together = TritonAttention(case.batch, case.scale)(case.q, case.k_cache, case.v_cache)
    alone = case.slice(0)
    state = TritonAttention(alone.batch, alone.scale)(alone.q, alone.k_cache, alone.v_cache)
    assert torch.equal(together.out[:1], state.out)
    assert torch.equal(together.lse[:1], state.lse)


@pytest.mark.parametrize("config", [SMALL_TILES, CHUNK_TILES])
def test_padding_rows_see_nothing(config, device):
    """A CUDA graph's padding: sequences of length 0 with one token, after the real ones."""
    case = make_paged((1, 1, 1), (40, -1, -1), device)
    state = attention(case, config)
    assert torch.equal(state.out[1:], torch.zeros_like(state.out[1:]))
    assert torch.equal(state.lse[1:], torch.full_like(state.lse[1:], float("-inf")))
    want = case.slice(0).reference
    torch.testing.assert_close(state.out[:1], want.out, atol=2e-5, rtol=2e-5)


def test_sequences_without_new_tokens_are_passed_over(device):
    case = make_paged((0, 2, 0, 0, 1, 0), (5, 20, 0, 9, 33, 2), device)
    assert_same(attention(case, SMALL_TILES), case.reference, torch.float32)


def test_block_id_beyond_32_bit_offsets(device, unwritten):
    """block_id * stride is 2^31 elements and more. The pool is reserved, never touched but for two blocks."""
    block_size, dim = 16, 64
    far = 2**31 // (block_size * dim) + 1
    k_cache, v_cache = (unwritten(far + 1, block_size, 1, dim, dtype=torch.float16, device=device) for _ in range(2))
    small = make_paged((1,), (20,), device, dtype=torch.float16)
    table = torch.tensor([[far, 1]], dtype=torch.int32, device=device)
    for source, target in zip(small.batch.block_table[0].tolist(), (far, 1), strict=True):
        k_cache[target], v_cache[target] = small.k_cache[source], small.v_cache[source]
    batch = small.batch
    got = paged_attention(
        small.q, k_cache, v_cache, batch.query_start_loc, batch.seq_lens, table, small.scale, 1, batch.max_seq_len
    )
    assert_same(got, small.reference, torch.float16)


def test_output_in_the_models_dtype(device):
    case = make_paged((1, 12), (300, 0), device, dtype=torch.float16)
    state = TritonAttention(case.batch, case.scale, out_dtype=torch.float16)(case.q, case.k_cache, case.v_cache)
    assert state.out.dtype == torch.float16
    assert_same(state, case.reference, torch.float16)


@pytest.mark.parametrize(
    "query_lens, kinds",
    [
        ((1, 1, 1), [(0, 3, 1)]),
        ((1, SHORT_QUERY, SHORT_QUERY + 1), [(0, 2, SHORT_QUERY), (2, 3, SHORT_QUERY + 1)]),
        ((512, 1, 300, 200), [(0, 1, 512), (1, 2, 1), (2, 4, 300)]),
    ],
)
def test_runs(query_lens, kinds):
    runs = split_runs(query_lens, (0,) * len(query_lens))
    assert [(run.seqs.start, run.seqs.stop, run.max_query_len) for run in runs] == kinds
    assert [run.tokens for run in runs] == [
        slice(sum(query_lens[:start]), sum(query_lens[:stop])) for start, stop, _ in kinds
    ]


@pytest.mark.parametrize("length", range(1, SHORT_QUERY + 1))
def test_short_queries_share_keys_per_tile_and_split(length):
    """What decides the order of a row's sums must be the same for every query that may share a launch."""
    first, other = tile_config(1, 4, 128, 2), tile_config(length, 4, 128, 2)
    assert (first.tile, first.split_size) == (other.tile, other.split_size)


@pytest.mark.parametrize(
    "config, says",
    [
        (TileConfig(4, 32, 0, 4, 2), "16"),  # Triton's interpreter would compute it, a tensor core cannot
        (TileConfig(16, 8, 0, 4, 2), "16"),
        (TileConfig(48, 32, 0, 4, 2), "powers of two"),
        (TileConfig(16, 32, 48, 4, 2), "split_size 48"),
    ],
)
def test_tiles_that_cannot_run_are_refused(config, says):
    with pytest.raises(KernelInputError, match=says):
        config.check(group=4, block_size=16)


def test_more_heads_than_rows_are_refused():
    with pytest.raises(KernelInputError, match="32 query heads"):
        SMALL_TILES.check(group=32, block_size=16)
