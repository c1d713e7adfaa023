"""Paged attention: one kernel for decode, chunked prefill and draft verification.

    q                 [T, heads, D]                          tokens of all sequences one after the other
    k_cache, v_cache  [num_blocks, block_size, kv_heads, D]  reached through block_table[seq, position // block_size]
    out, lse          [splits, T, heads, D], [splits, T, heads]      joined by merge.py

    rows of a tile = (query position, head of the group)      grid = (query tile, KV head, split of the keys)

         KV head 0 ->  q0 h0 | q0 h1 | q0 h2 | q1 h0 | ...    so that one load of K and V serves the whole group
         keys      ->  split 0: 0..255 | split 1: 256..511 | ...   each cut into tiles

Query tiles are counted per sequence, so no tile spans two: sequence s starts at tile query_start_loc[s] // BLOCK_Q + s,
and a program finds its sequence by binary search. Scores are kept in base 2 inside; lse is a natural logarithm.
Least traffic: 2 * context * kv_heads * D * itemsize bytes a sequence: K and V once per KV head.

Source: FlashAttention-2 (Dao 2023), PagedAttention (Kwon et al. 2023), Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_engine.attention import AttentionState
from mini_engine.kernels.checks import (
    FLOATS,
    KernelInputError,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_same_strides,
    check_shape,
)
from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.tiles import TileConfig, tile_config

__all__ = ["paged_attention", "paged_attention_kernel"]


@triton.jit
def find_sequence(p_query_start_loc, i_tile, num_seqs, first_token, BLOCK_Q: tl.constexpr):
    """The last sequence whose first query tile is not after i_tile."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(p_query_start_loc + middle) - first_token) // BLOCK_Q + middle <= i_tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "stride_table"],
    do_not_specialize_on_alignment=["p_query_start_loc", "p_seq_lens", "p_block_table"],
)
def paged_attention_kernel(
    p_q,
    p_k,
    p_v,
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
    stride_kv_head,
    stride_table,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    LN_2: tl.constexpr = 0.6931471805599453
    EMPTY: tl.constexpr = float("-inf")
    i_tile, i_kv_head, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    # Which queries: the launch may be a slice of a larger batch, whose tokens start at first_token.
    first_token = tl.load(p_query_start_loc)
    i_seq = find_sequence(p_query_start_loc, i_tile, num_seqs, first_token, BLOCK_Q)
    start = tl.load(p_query_start_loc + i_seq) - first_token
    query_len = tl.load(p_query_start_loc + i_seq + 1) - first_token - start
    first_query = (i_tile - (start // BLOCK_Q + i_seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    seq_len = tl.load(p_seq_lens + i_seq)
    # Row r is query r // GROUP of the tile and head r % GROUP of the group: 32-bit offsets from 64-bit scalars.
    o_row = tl.arange(0, BLOCK_M)
    o_query = o_row // GROUP
    o_head = o_row % GROUP
    position = seq_len - query_len + first_query + o_query
    in_rows = (o_row < BLOCK_Q * GROUP) & (position < seq_len)
    token = (start + first_query).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    state = (i_split.to(tl.int64) * num_tokens + token) * heads + i_kv_head * GROUP
    o_state = o_query * heads + o_head

    # Which keys: those of the split that the last query of the tile sees.
    first_key = i_split * SPLIT_SIZE
    end = tl.minimum(seq_len, seq_len - query_len + first_query + BLOCK_Q)
    if SPLIT_SIZE > 0:
        end = tl.minimum(end, first_key + SPLIT_SIZE)
        if first_key >= end:
            tl.store(p_lse + state + o_state, tl.full([BLOCK_M], EMPTY, tl.float32), mask=in_rows)
            return

    o_dim = tl.arange(0, D_PADDED)
    in_head = o_dim < D
    p_q_tile = p_q + token * stride_q_token + i_kv_head * GROUP * stride_q_head
    o_q = o_query[:, None] * stride_q_token + o_head[:, None] * stride_q_head + o_dim[None, :]
    q = tl.load(p_q_tile + o_q, mask=in_rows[:, None] & in_head[None, :], other=0.0)
    if UPCAST:  # Triton's interpreter computes bf16 wrongly; float32 holds it exactly
        q = q.to(tl.float32)
    scale_2 = scale / LN_2
    top = tl.full([BLOCK_M], EMPTY, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)

    p_blocks = p_block_table + i_seq.to(tl.int64) * stride_table
    o_kv_head = i_kv_head * stride_kv_head + o_dim
    for tile in range(first_key, end, TILE):
        o_key = tile + tl.arange(0, TILE)
        in_keys = o_key < end
        # int64 before the product: block * stride passes 2^31 in a pool of a few GB.
        block = tl.load(p_blocks + o_key // BLOCK_SIZE, mask=in_keys, other=0).to(tl.int64)
        o_slot = block * stride_block + (o_key % BLOCK_SIZE) * stride_slot
        k = tl.load(p_k + o_slot[None, :] + o_kv_head[:, None], mask=in_keys[None, :] & in_head[:, None], other=0.0)
        # V is masked as well: a probability of 0 times an unwritten NaN would be NaN.
        v = tl.load(p_v + o_slot[:, None] + o_kv_head[None, :], mask=in_keys[:, None] & in_head[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_2
        scores = tl.where((o_key[None, :] <= position[:, None]) & in_keys[None, :], scores, EMPTY)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == EMPTY, 0.0, new_top)  # a row that sees nothing yet: -inf - -inf would be NaN
        p = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(p, axis=1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(total > 0.0, total, 1.0)  # a row that saw nothing: out 0, and top is still -inf
    out = acc * (1.0 / total)[:, None]
    lse = (top + tl.log2(total)) * LN_2
    p_out_tile = p_out + state * D
    tl.store(
        p_out_tile + o_state[:, None] * D + o_dim[None, :],
        out.to(p_out.dtype.element_ty),
        mask=in_rows[:, None] & in_head[None, :],
    )
    tl.store(p_lse + state + o_state, lse, mask=in_rows)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
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

    q [T, heads, D]; query_start_loc [S + 1], seq_lens [S], block_table [S, width]: int32; `query_start_loc` may be a
    slice that starts above 0, if q is cut alike. max_query_len and max_seq_len bound the sequences, on the host.
    K and V are multiplied in q's dtype, whichever they are kept in.
    out and lse [T, heads, ...] are made (in float32) where the caller does not give them. Raises KernelInputError.
    """
    num_tokens, heads, dim = q.shape
    num_seqs, kv_heads = len(seq_lens), k_cache.shape[2]
    config = config or tile_config(max_query_len, heads // max(kv_heads, 1), dim, k_cache.itemsize)
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _check(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, out, lse)
    config.check(heads // kv_heads, k_cache.shape[1])
    if not num_tokens:
        return AttentionState(out, lse)

    num_splits = config.num_splits(max_seq_len)
    part_out, part_lse = out, lse
    if num_splits > 1:
        part_out = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((num_splits, num_tokens, heads), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    num_tiles = num_tokens // (config.block_m // group) + num_seqs
    paged_attention_kernel[(num_tiles, kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        part_out,
        part_lse,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        num_seqs,
        num_tokens,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        D=dim,
        D_PADDED=triton.next_power_of_2(dim),
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=config.block_m,
        TILE=config.tile,
        SPLIT_SIZE=config.split_size if num_splits > 1 else 0,
        UPCAST=bool(triton.knobs.runtime.interpret) and torch.bfloat16 in (q.dtype, k_cache.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return merge_states(part_out, part_lse, out, lse) if num_splits > 1 else AttentionState(out, lse)


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, heads, dim = q.shape
    check_shape("k_cache", k_cache, None, None, None, dim)
    if heads % k_cache.shape[2]:
        raise KernelInputError(f"{heads} query heads cannot be shared out evenly over {k_cache.shape[2]} KV heads")
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("query_start_loc", query_start_loc, len(seq_lens) + 1)
    check_shape("block_table", block_table, len(seq_lens), None)
    check_shape("out", out, num_tokens, heads, dim)
    check_shape("lse", lse, num_tokens, heads)
    check_dtype("q", q, *FLOATS)
    check_dtype("k_cache", k_cache, *FLOATS)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    for name, tensor in {"query_start_loc": query_start_loc, "seq_lens": seq_lens, "block_table": block_table}.items():
        check_dtype(name, tensor, torch.int32)
    check_dtype("out", out, *FLOATS)
    check_dtype("lse", lse, torch.float32)
    check_rows(q=q, k_cache=k_cache, block_table=block_table)
    check_same_strides(k_cache=k_cache, v_cache=v_cache)
    check_contiguous(query_start_loc=query_start_loc, seq_lens=seq_lens, out=out, lse=lse)
    check_device(
        q.device, k_cache=k_cache, v_cache=v_cache, query_start_loc=query_start_loc, seq_lens=seq_lens,
        block_table=block_table, out=out, lse=lse,
    )  # fmt: skip
