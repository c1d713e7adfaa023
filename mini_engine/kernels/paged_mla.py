"""Paged attention over an MLA model's latent cache: decode, draft verification and short chunks, with lse.

    q         [T, heads, R + P]                   absorbed queries: R = kv_lora_rank (512), P = rotary elements (64)
    cache     [num_blocks, block_size, 1, R + P]  one for keys and values, all heads share it
    out, lse  [splits, T, heads, R], [splits, T, heads]      joined by merge.py

    latent c | rotary k    score = q[:R] . c + q[R:] . k     two products: 576 padded to one of 1024 would cost twice
       R     |    P        value = c                         the tile of c that was multiplied by q is multiplied by p

    rows of a tile = (query position, head)      grid = (query tile, tile of heads), split of the keys

A tile of queries reads each latent once, as key and as value, for all its heads. Least traffic: context * (R + P) *
itemsize bytes a sequence; asked for is that times the tiles of its new tokens: of one token 1 at up to 32 heads, 4 at
128. Sequences are found, keys cut into splits and states merged as in paged_attention.py.

Source: DeepSeek-V2 (2024), section 2.1; the absorbed form as in FlashMLA (DeepSeek 2025).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_engine.attention import AttentionState, attend
from mini_engine.batch import Batch
from mini_engine.kernels.checks import (
    FLOATS,
    KernelInputError,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)
from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.paged_attention import find_sequence
from mini_engine.kernels.tiles import MIN_ROWS, SHORT_QUERY, TileConfig

__all__ = ["MAX_RANK", "mla_attention_reference", "mla_tile_config", "paged_mla", "paged_mla_kernel"]

MAX_RANK = 512  # the sums of a tile, rows * rank, fill the registers; every published model has 512 or less


def mla_attention_reference(
    q: torch.Tensor, cache: torch.Tensor, kv_lora_rank: int, batch: Batch, scale: float
) -> AttentionState:
    """One sequence at a time, by the formula. Shapes as above; out [T, heads, R], lse [T, heads] float32."""
    states, first = [], 0
    for row, (num_new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        length = context + num_new
        blocks = batch.block_table[row, : -(-length // cache.shape[1])]
        keys = cache.index_select(0, blocks).flatten(0, 2)[:length]
        positions = torch.arange(context, length, device=q.device)
        visible = torch.arange(length, device=q.device) <= positions[:, None]
        packed = q[first : first + num_new].transpose(0, 1)
        states.append(attend(packed, keys, keys[:, :kv_lora_rank], scale, visible))
        first += num_new
    return AttentionState(*(torch.cat(parts, dim=1).transpose(0, 1) for parts in zip(*states, strict=True)))


def mla_tile_config(query_len: int, heads: int, itemsize: int) -> TileConfig:
    """For sequences of that many new tokens. It depends on them and the model alone, so that a sequence's result never
    depends on its batch-mates. itemsize: bytes of the cache.

    Shared memory holds q and two tiles of latents in bf16, one being multiplied while the next arrives: 92 KiB of
    sm_120's 99 with 16 rows by 32 keys, 74 with 32 by 16. Five stages: of a table entry and of a latent, two ahead.
    A tile of 64 rows takes 72 KiB for q alone. With more rows fewer keys, or registers spill; with few heads as well,
    where a tile has many queries.
    Splits: their states are 11 % of the traffic at 16 heads, 44 % at 128, where the products take longer than it.
    """
    short = query_len <= SHORT_QUERY
    if itemsize > 2:
        return TileConfig(MIN_ROWS, 16, 512 if short else 0, num_warps=4, num_stages=3)
    if heads < MIN_ROWS // 2 or short and query_len * heads <= MIN_ROWS:
        return TileConfig(MIN_ROWS, 32, 512 if short else 0, num_warps=4, num_stages=5)
    return TileConfig(2 * MIN_ROWS, 16, 1024 if short else 0, num_warps=4, num_stages=5)


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "stride_table"],
    do_not_specialize_on_alignment=["p_query_start_loc", "p_seq_lens", "p_block_table"],
)
def paged_mla_kernel(
    p_q,
    p_cache,
    p_out,
    p_lse,
    p_query_start_loc,
    p_seq_lens,
    p_block_table,
    scale,
    num_seqs,
    num_tokens,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_table,
    HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // TILE_HEADS
    HEAD_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    LN_2: tl.constexpr = 0.6931471805599453
    EMPTY: tl.constexpr = float("-inf")
    # The tiles of heads of one query are neighbours in the grid: what one read, the others find in the L2 cache.
    i_tile, i_heads, i_split = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES, tl.program_id(1)

    # Which queries: the launch may be a slice of a larger batch, whose tokens start at first_token. Where one tile has
    # room for all queries of any sequence, as in a decode, there is nothing to search.
    first_token = tl.load(p_query_start_loc)
    i_seq = i_tile if ONE_TILE else find_sequence(p_query_start_loc, i_tile, num_seqs, first_token, BLOCK_Q)
    start = tl.load(p_query_start_loc + i_seq) - first_token
    query_len = tl.load(p_query_start_loc + i_seq + 1) - first_token - start
    first_query = 0 if ONE_TILE else (i_tile - (start // BLOCK_Q + i_seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(p_seq_lens + i_seq)
    o_row = tl.arange(0, BLOCK_M)
    o_query = o_row // TILE_HEADS
    o_head = i_heads * TILE_HEADS + o_row % TILE_HEADS
    in_rows = (o_row < BLOCK_Q * TILE_HEADS) & (o_head < HEADS) & (first_query + o_query < query_len)
    token = (start + first_query).to(tl.int64)
    state = (i_split.to(tl.int64) * num_tokens + token) * HEADS
    o_state = o_query * HEADS + o_head

    # Which keys: those of the split that the last query of the tile sees; a row sees those below its limit. No tile of
    # keys passes the end of a split, which is a multiple of it.
    first_key = i_split * SPLIT_SIZE
    end = tl.minimum(seq_len, seq_len - query_len + first_query + BLOCK_Q)
    if SPLIT_SIZE > 0:
        end = tl.minimum(end, first_key + SPLIT_SIZE)
        if first_key >= end:
            tl.store(p_lse + state + o_state, tl.full([BLOCK_M], EMPTY, tl.float32), mask=in_rows)
            return
    limit = seq_len - query_len + first_query + o_query + 1

    o_dim, o_rope = tl.arange(0, RANK_PADDED), tl.arange(0, ROPE_PADDED)
    in_rank, in_rope = o_dim < RANK, o_rope < ROPE
    p_q_rows = p_q + token * stride_q_token + o_query[:, None] * stride_q_token + o_head[:, None] * stride_q_head
    q = tl.load(p_q_rows + o_dim[None, :], mask=in_rows[:, None] & in_rank[None, :], other=0.0)
    q_rope = tl.load(p_q_rows + RANK + o_rope[None, :], mask=in_rows[:, None] & in_rope[None, :], other=0.0)
    if UPCAST:  # Triton's interpreter computes bf16 wrongly; float32 holds it exactly
        q = q.to(tl.float32)
        q_rope = q_rope.to(tl.float32)
    scale_2 = scale / LN_2
    top = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PADDED], tl.float32)

    p_blocks = p_block_table + i_seq.to(tl.int64) * stride_table
    for tile in range(first_key, end, TILE):
        o_key = tile + tl.arange(0, TILE)
        in_keys = o_key < end
        # int64 before the product: block * stride passes 2^31 in a pool of a few GB.
        block = tl.load(p_blocks + o_key // BLOCK_SIZE, mask=in_keys, other=0).to(tl.int64)
        o_slot = block * stride_block + (o_key % BLOCK_SIZE) * stride_slot
        # Masked as well as the scores: the latents are the values, and 0 times an unwritten NaN would be NaN.
        # They are loaded as they lie, rows by columns, and transposed in shared memory: the compiler copies a tile that
        # is loaded transposed through registers, not in the background.
        p_keys = p_cache + o_slot[:, None]
        latent = tl.load(p_keys + o_dim[None, :], mask=in_keys[:, None] & in_rank[None, :], other=0.0).to(q.dtype)
        rope = tl.load(p_keys + RANK + o_rope[None, :], mask=in_keys[:, None] & in_rope[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee") * scale_2
        scores = tl.where(o_key[None, :] < limit[:, None], scores, EMPTY)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == EMPTY, 0.0, new_top)  # a row that sees nothing yet: -inf - -inf would be NaN
        p = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q.dtype), latent, acc * rescale[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(total > 0.0, total, 1.0)  # a row that saw nothing: out 0, and top is still -inf
    out = acc * (1.0 / total)[:, None]
    lse = (top + tl.log2(total)) * LN_2
    tl.store(
        p_out + state * RANK + o_state[:, None] * RANK + o_dim[None, :],
        out.to(p_out.dtype.element_ty),
        mask=in_rows[:, None] & in_rank[None, :],
    )
    tl.store(p_lse + state + o_state, lse, mask=in_rows)


def paged_mla(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_lora_rank: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> AttentionState:
    """Causal attention of S sequences: the last tokens of each, seen from their own positions on backwards.

    q [T, heads, R + P], cache [num_blocks, block_size, 1, R + P]; query_start_loc [S + 1], seq_lens [S],
    block_table [S, width]: int32; `query_start_loc` may be a slice that starts above 0, if q is cut alike.
    max_query_len and max_seq_len bound the sequences, on the host. A sequence of length 0 gives (0, -inf).
    out [T, heads, R] and lse [T, heads] are made (in float32) where the caller does not give them. Latents are
    multiplied in q's dtype. Raises KernelInputError.
    """
    num_tokens, heads, dim = q.shape
    config = config or mla_tile_config(max_query_len, heads, cache.itemsize)
    if out is None:
        out = torch.empty((num_tokens, heads, kv_lora_rank), dtype=torch.float32, device=q.device)
    if lse is None:
        lse = torch.empty((num_tokens, heads), dtype=torch.float32, device=q.device)
    _check(q, cache, kv_lora_rank, query_start_loc, seq_lens, block_table, out, lse)
    tile_heads = min(heads, config.block_m)
    config.check(tile_heads, cache.shape[1])
    if not num_tokens:
        return AttentionState(out, lse)

    num_splits = config.num_splits(max_seq_len)
    part_out, part_lse = out, lse
    if num_splits > 1:
        part_out = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_splits, *lse.shape), dtype=torch.float32, device=q.device)
    block_q = config.block_m // tile_heads
    one_tile = max_query_len <= block_q
    query_tiles = len(seq_lens) + (0 if one_tile else num_tokens // block_q)
    paged_mla_kernel[(query_tiles * triton.cdiv(heads, tile_heads), num_splits)](
        q,
        cache,
        part_out,
        part_lse,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        len(seq_lens),
        num_tokens,
        *q.stride()[:2],
        *cache.stride()[:2],
        block_table.stride(0),
        HEADS=heads,
        TILE_HEADS=tile_heads,
        RANK=kv_lora_rank,
        ROPE=dim - kv_lora_rank,
        RANK_PADDED=max(MIN_ROWS, triton.next_power_of_2(kv_lora_rank)),
        ROPE_PADDED=max(MIN_ROWS, triton.next_power_of_2(dim - kv_lora_rank)),
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=config.block_m,
        TILE=config.tile,
        SPLIT_SIZE=config.split_size if num_splits > 1 else 0,
        ONE_TILE=one_tile,
        UPCAST=bool(triton.knobs.runtime.interpret) and torch.bfloat16 in (q.dtype, cache.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return merge_states(part_out, part_lse, out, lse) if num_splits > 1 else AttentionState(out, lse)


def _check(
    q: torch.Tensor,
    cache: torch.Tensor,
    kv_lora_rank: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, heads, dim = q.shape
    if not 0 < kv_lora_rank <= min(MAX_RANK, dim - 1):
        raise KernelInputError(
            f"kv_lora_rank {kv_lora_rank} must be from 1 to {MAX_RANK} and leave rotary elements of the {dim} of q"
        )
    check_shape("cache", cache, None, None, 1, dim)
    check_shape("query_start_loc", query_start_loc, len(seq_lens) + 1)
    check_shape("block_table", block_table, len(seq_lens), None)
    check_shape("out", out, num_tokens, heads, kv_lora_rank)
    check_shape("lse", lse, num_tokens, heads)
    check_dtype("q", q, *FLOATS)
    check_dtype("cache", cache, *FLOATS)
    indices = {"query_start_loc": query_start_loc, "seq_lens": seq_lens, "block_table": block_table}
    for name, tensor in indices.items():
        check_dtype(name, tensor, torch.int32)
    check_dtype("out", out, *FLOATS)
    check_dtype("lse", lse, torch.float32)
    check_rows(q=q, cache=cache, block_table=block_table)
    check_contiguous(query_start_loc=query_start_loc, seq_lens=seq_lens, out=out, lse=lse)
    check_device(q.device, cache=cache, out=out, lse=lse, **indices)
