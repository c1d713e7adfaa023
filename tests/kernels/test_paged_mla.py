"""Paged latent attention against the torch reference: (out, lse) of every token, over a pool that is NaN where it may
be. One cache is keys and values at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import mini_engine.kernels.paged_mla as module
from mini_engine.attention import AttentionState
from mini_engine.context_shard import ContextShard
from mini_engine.kernels.checks import KernelInputError
from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.paged_mla import MAX_RANK, mla_attention_reference, mla_tile_config, paged_mla
from mini_engine.kernels.tiles import MIN_ROWS, SHORT_QUERY, TileConfig
from mini_engine.ops import Contexts
from mini_engine.triton_attention import rows_of
from mini_engine.triton_mla import TritonMLAAttention
from tests.kernels.paged import TOLERANCE, Paged, make_paged

RANK, ROPE = 32, 16
SMALL_TILES = TileConfig(block_m=16, tile=16, split_size=32, num_warps=4, num_stages=2)
NO_SPLITS = TileConfig(block_m=32, tile=32, split_size=0, num_warps=4, num_stages=2)
SPLIT = mla_tile_config(1, MIN_ROWS, 2).split_size


def make_latent(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    device: torch.device,
    heads: int = 4,
    rank: int = RANK,
    rope: int = ROPE,
    **options: object,
) -> Paged:
    return make_paged(query_lens, context_lens, device, group=heads, dim=rank + rope, **options)  # type: ignore[arg-type]


def attention(case: Paged, config: TileConfig | None = None, rank: int = RANK) -> AttentionState:
    batch = case.batch
    return paged_mla(
        case.q,
        case.k_cache,
        rank,
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        case.scale,
        batch.max_query_len,
        batch.max_seq_len,
        config=config,
    )


def backend(case: Paged, out_dtype: torch.dtype = torch.float32) -> AttentionState:
    return TritonMLAAttention(case.batch, case.scale, out_dtype)(case.q, case.k_cache, case.k_cache[..., :RANK])


def reference(case: Paged, rank: int = RANK) -> AttentionState:
    return mla_attention_reference(case.q, case.k_cache, rank, case.batch, case.scale)


def assert_same(got: AttentionState, want: AttentionState, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(got.out.float(), want.out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(got.lse, want.lse, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_reference_is_the_formula():
    """Token by token in float64: what the reference's batched products are held to."""
    case = make_latent((2, 1), (17, 0), torch.device("cpu"), heads=2)
    got = reference(case)
    token = 0
    for row, (new, context) in enumerate(zip(case.batch.query_lens, case.batch.context_lens, strict=True)):
        for position in range(context, context + new):
            table = case.batch.block_table[row]
            keys = torch.stack([case.k_cache[table[p // 16], p % 16, 0] for p in range(position + 1)]).double()
            scores = keys @ case.q[token].double().T * case.scale
            torch.testing.assert_close(got.lse[token].double(), scores.exp().sum(0).log(), atol=1e-5, rtol=1e-5)
            want = torch.softmax(scores, 0).T @ keys[:, :RANK]
            torch.testing.assert_close(got.out[token].double(), want, atol=1e-5, rtol=1e-5)
            token += 1


@pytest.mark.parametrize(
    "seq_lens",
    [
        (1, 15, 16, 17, 31, 32, 33),  # around the edges of blocks (16) and tiles (16 and 32)
        (SPLIT - 1, SPLIT, SPLIT + 1),
        (2 * SPLIT + 1, 5),  # two of the three splits of the second sequence are empty
    ],
)
def test_decode(seq_lens, device):
    case = make_latent((1,) * len(seq_lens), tuple(length - 1 for length in seq_lens), device)
    assert_same(attention(case), reference(case))


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 16, 24, 40, 128])
def test_heads(heads, device):
    """Decode, verify and a chunk in one launch; heads that leave rows of a tile empty, and more heads than rows."""
    query_lens = (1, 3, 9) if heads <= 16 else (1, 2)
    case = make_latent(query_lens, (18, 30, 6)[: len(query_lens)], device, heads=heads)
    for config in (SMALL_TILES, NO_SPLITS):
        assert_same(attention(case, config), reference(case))


@pytest.mark.parametrize("rank, rope", [(64, 16), (32, 64), (48, 8), (80, 24), (16, 2)])
def test_ranks(rank, rope, device):
    case = make_latent((1, 5), (40, 20), device, rank=rank, rope=rope)
    assert_same(attention(case, SMALL_TILES, rank), reference(case, rank))


@pytest.mark.parametrize("heads, query_lens", [(16, (1, 1)), (128, (1,)), (2, (1, 12))])
def test_the_width_of_deepseek(heads, query_lens, device):
    """512 + 64 elements, in bf16, with the tiles that a GPU would get."""
    contexts = (40, 7)[: len(query_lens)]
    case = make_latent(query_lens, contexts, device, heads, MAX_RANK, 64, dtype=torch.bfloat16)
    assert_same(attention(case, rank=MAX_RANK), reference(case, MAX_RANK), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("query_lens, contexts", [((1, 1), (40, 599)), ((4, 3), (30, 0)), ((20,), (3,))])
def test_half_precision(dtype, query_lens, contexts, device):
    case = make_latent(query_lens, contexts, device, heads=6, dtype=dtype)
    assert_same(attention(case), reference(case), dtype)


def test_cache_narrower_than_the_model(device):
    case = make_latent((1, 3), (40, 20), device)
    case = replace(case, k_cache=case.k_cache.bfloat16())
    assert_same(attention(case), reference(case))


@pytest.mark.parametrize("block_size", [1, 4, 12, 32, 128])
def test_block_sizes(block_size, device):
    case = make_latent((1, 6, 1), (70, 33, 0), device, block_size=block_size, heads=3)
    assert_same(attention(case, SMALL_TILES), reference(case))


@pytest.mark.parametrize("context", [23, 24, 28, 31, 32, 58, 60, 64])
def test_verify_across_a_split_edge(context, device):
    """Of 8 new tokens some see nothing of the last split (32 keys): their part of it must be empty, not zero."""
    case = make_latent((8,), (context,), device, heads=2)
    assert_same(attention(case, SMALL_TILES), reference(case))


def test_queries_that_see_nothing_of_a_split(device, monkeypatch):
    """Of 8 new tokens from position 28 on, 4 see nothing of the second split: their state in it is (0, -inf)."""
    parts = []
    monkeypatch.setattr(module, "merge_states", lambda *states: parts.append(states[:2]) or AttentionState(*states[2:]))
    attention(make_latent((8,), (28,), device, heads=2), SMALL_TILES)
    out, lse = parts[0]
    assert torch.equal(out[1, :4], torch.zeros_like(out[1, :4]))
    assert torch.equal(lse[1, :4], torch.full_like(lse[1, :4], float("-inf")))
    assert torch.isfinite(out[1, 4:]).all() and torch.isfinite(lse[1, 4:]).all()


def test_sharp_scores_over_many_keys(device):
    """A logarithm in the wrong base shows where scores are large and differ."""
    case = make_latent((1, 2), (150, 120), device)
    case = replace(case, scale=1.0)
    assert reference(case).lse.max() > 20
    assert_same(attention(case, SMALL_TILES), reference(case))


@pytest.mark.parametrize("heads", [3, 7, 24])
def test_every_output_is_written_by_one_program(heads, stored):
    """Padding rows of a tile must not write: on a GPU the next tile may have written that row already."""
    case = make_latent((1, 6, 1), (20, 9, 40), torch.device("cpu"), heads)
    for config in (SMALL_TILES, NO_SPLITS):
        stored.clear()
        attention(case, config)
        addresses = torch.cat([torch.from_numpy(item.astype("int64")) for item in stored])
        assert len(addresses) and len(addresses) == len(addresses.unique())


def test_mixed_batch_through_the_backend(device):
    """Decode, verify, a chunk, and decode again: four launches of one batch, of three kinds."""
    case = make_latent((1, 1, 7, 12, 1), (600, 2, 20, 33, 15), device, heads=8, dtype=torch.float16)
    assert [run.seqs for run in TritonMLAAttention(case.batch, case.scale).runs(8, 2)] == [
        slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5),
    ]  # fmt: skip
    assert_same(backend(case), reference(case), torch.float16)


def test_result_does_not_depend_on_batch_mates(device):
    """To the bit: neither on the number of splits that a longer neighbour brings, nor on a chunk beside it."""
    case = make_latent((1, 1, 3, 12), (20, 600, 9, 0), device, heads=8, dtype=torch.float16)
    together = backend(case)
    for row, tokens in ((0, slice(0, 1)), (2, slice(2, 5))):
        alone = case.slice(row)
        state = backend(alone)
        assert torch.equal(together.out[tokens], state.out)
        assert torch.equal(together.lse[tokens], state.lse)


@pytest.mark.parametrize("config", [SMALL_TILES, NO_SPLITS])
def test_padding_rows_see_nothing(config, device):
    """A CUDA graph's padding: sequences of length 0 with one token, after the real ones."""
    case = make_latent((1, 1, 1), (40, -1, -1), device)
    state = attention(case, config)
    assert torch.equal(state.out[1:], torch.zeros_like(state.out[1:]))
    assert torch.equal(state.lse[1:], torch.full_like(state.lse[1:], float("-inf")))
    assert_same(AttentionState(state.out[:1], state.lse[:1]), reference(case.slice(0)))


def test_sequences_without_new_tokens_are_passed_over(device):
    case = make_latent((0, 2, 0, 0, 1, 0), (5, 20, 0, 9, 33, 2), device)
    assert_same(attention(case, SMALL_TILES), reference(case))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("contexts", [(1, 3, 37), (0, 2, 66)])
def test_context_parallel_ranks_merge_to_the_whole(ranks, contexts, device):
    """Every new token is a row of its own over what a rank has of the context, perhaps nothing; the ranks' states merge
    to attention over all of it."""
    heads, query_lens, block_size = 4, (1, 3, 2), 4
    case = make_latent((1,) * 3, tuple(length - 1 for length in contexts), device, heads, block_size=block_size)
    q = torch.randn(sum(query_lens), heads, RANK + ROPE, generator=torch.Generator().manual_seed(1)).to(device)
    parts = []
    for rank in range(ranks):
        shard = ContextShard(rank, ranks)
        lens = tuple(shard.local_length(length) for length in contexts)
        table = torch.arange(27, 0, -1, dtype=torch.int32, device=device).view(3, 9)
        cache = case.k_cache.new_full((28, *case.k_cache.shape[1:]), float("nan"))
        for row, length in enumerate(contexts):
            owned = [p for p in range(length) if shard.owns(p)]
            assert len(owned) == lens[row]
            for i, position in enumerate(owned):
                block = case.batch.block_table[row, position // block_size]
                cache[table[row, i // block_size], i % block_size] = case.k_cache[block, position % block_size]
        attend = TritonMLAAttention(rows_of(Contexts(table, query_lens, lens)), case.scale)
        parts.append(attend(q, cache, cache[..., :RANK]))
    assert any(torch.isneginf(part.lse).any() for part in parts)
    got = merge_states(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))
    whole = rows_of(Contexts(case.batch.block_table, query_lens, contexts))
    assert_same(got, mla_attention_reference(q, case.k_cache, RANK, whole, case.scale))


def test_block_id_beyond_32_bit_offsets(device, unwritten):
    """block_id * stride is 2^31 elements and more. The pool is reserved, never touched but for two blocks."""
    block_size, dim = 16, RANK + ROPE
    far = 2**31 // (block_size * dim) + 1
    cache = unwritten(far + 1, block_size, 1, dim, dtype=torch.float16, device=device)
    small = make_latent((1,), (20,), device, dtype=torch.float16)
    table = torch.tensor([[far, 1]], dtype=torch.int32, device=device)
    for source, target in zip(small.batch.block_table[0].tolist(), (far, 1), strict=True):
        cache[target] = small.k_cache[source]
    got = attention(replace(small, k_cache=cache, batch=replace(small.batch, block_table=table)))
    assert_same(got, reference(small), torch.float16)


def test_output_in_the_models_dtype(device):
    case = make_latent((1, 12), (300, 0), device, dtype=torch.float16)
    state = backend(case, torch.float16)
    assert state.out.dtype == torch.float16 and state.lse.dtype == torch.float32
    assert_same(state, reference(case), torch.float16)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 64, 128])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_the_heads_of_every_shard(heads, itemsize):
    for query_len in (1, SHORT_QUERY, SHORT_QUERY + 1, 500):
        config = mla_tile_config(query_len, heads, itemsize)
        config.check(min(heads, config.block_m), block_size=16)
        assert bool(config.split_size) == (query_len <= SHORT_QUERY)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"q": torch.zeros(2, 4, 32)}, r"kv_lora_rank 32 must be from 1 to 512 and leave rotary elements of the 32 of"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0 must be"),
        ({"q": torch.zeros(2, 4, 600), "kv_lora_rank": 513}, "kv_lora_rank 513 must be from 1 to 512"),
        ({"q": torch.zeros(2, 4, 64)}, r"cache must have shape \[any, any, 1, 64\]"),
        ({"cache": torch.zeros(8, 16, 2, 48)}, r"cache must have shape \[any, any, 1, 48\], got \[8, 16, 2, 48\]"),
        ({"cache": torch.zeros(8, 16, 1, 48).double()}, "cache must be torch.float32 or"),
        ({"q": torch.zeros(2, 48, 4).transpose(1, 2)}, "q must be contiguous in its last"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, r"query_start_loc must have shape \[3\]"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be torch.int32"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"block_table must have shape \[2, any\]"),
        ({"out": torch.zeros(2, 4, 48)}, r"out must have shape \[2, 4, 32\]"),
        ({"lse": torch.zeros(2, 4).half()}, "lse must be torch.float32"),
    ],
)
def test_refuses(changes, says):
    case = make_latent((1, 1), (5, 20), torch.device("cpu"))
    arguments: dict = {
        "q": case.q,
        "cache": case.k_cache,
        "kv_lora_rank": RANK,
        "query_start_loc": case.batch.query_start_loc,
        "seq_lens": case.batch.seq_lens,
        "block_table": case.batch.block_table,
        **changes,
    }
    with pytest.raises(KernelInputError, match=says):
        paged_mla(**arguments, scale=case.scale, max_query_len=1, max_seq_len=21)


def test_values_elsewhere_are_refused():
    case = make_latent((1,), (5,), torch.device("cpu"))
    packed = case.k_cache.flatten()[: 16 * RANK].view(1, 16, 1, RANK)  # starts alike, other strides
    for values in (case.k_cache[..., :RANK].clone(), case.k_cache[..., ROPE:], packed):
        with pytest.raises(KernelInputError, match=r"v_cache must be k_cache\[..., :32\]"):
            TritonMLAAttention(case.batch, case.scale)(case.q, case.k_cache, values)


def test_nothing_to_do_is_no_launch():
    """A grid of 0 programs is an error on a GPU."""
    case = make_latent((1,), (5,), torch.device("cpu"))
    empty = replace(case.batch, query_start_loc=case.batch.query_start_loc * 0)
    state = attention(replace(case, q=case.q[:0], batch=empty))
    assert state.out.shape == (0, 4, RANK) and state.lse.shape == (0, 4)
