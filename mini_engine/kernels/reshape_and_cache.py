"""Store K and V of new tokens at their slots in the paged cache.

    k, v              [T, kv_heads, D]                       rows of the QKV product: views with gaps are fine
    slot_mapping      [T] int64                              block_id * block_size + offset; below 0: not stored
    k_cache, v_cache  [num_blocks, block_size, kv_heads, D]  one layer

One program a token and KV head. Least traffic: 2 * 2 * T * kv_heads * D * itemsize bytes (read and written once).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_engine.kernels.checks import FLOATS, check_device, check_dtype, check_rows, check_same_strides, check_shape


def reshape_and_cache_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, k_cache.shape[1])
            k_cache[block, offset] = k[token].to(k_cache.dtype)
            v_cache[block, offset] = v[token].to(v_cache.dtype)


@triton.jit(do_not_specialize_on_alignment=["p_slot_mapping"])
def reshape_and_cache_kernel(
    p_k,
    p_v,
    p_k_cache,
    p_v_cache,
    p_slot_mapping,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_cache_block,
    stride_cache_slot,
    stride_cache_head,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slot_mapping + i_token)
    if slot < 0:
        return
    o_dim = tl.arange(0, D_PADDED)
    in_head = o_dim < D
    k = tl.load(p_k + i_token * stride_k_token + i_head * stride_k_head + o_dim, mask=in_head)
    v = tl.load(p_v + i_token * stride_v_token + i_head * stride_v_head + o_dim, mask=in_head)
    # slot is int64, so block * stride cannot overflow however large the pool is.
    place = slot // BLOCK_SIZE * stride_cache_block + slot % BLOCK_SIZE * stride_cache_slot + i_head * stride_cache_head
    tl.store(p_k_cache + place + o_dim, k.to(p_k_cache.dtype.element_ty), mask=in_head)
    tl.store(p_v_cache + place + o_dim, v.to(p_v_cache.dtype.element_ty), mask=in_head)


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k and v [T, kv_heads, D] into the caches of one layer, in place. Raises KernelInputError."""
    num_tokens, kv_heads, dim = k.shape
    check_shape("v", v, num_tokens, kv_heads, dim)
    check_shape("k_cache", k_cache, None, None, kv_heads, dim)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("slot_mapping", slot_mapping, num_tokens)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_dtype("k", k, *FLOATS)
    check_dtype("v", v, k.dtype)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_rows(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check_same_strides(k_cache=k_cache, v_cache=v_cache)
    check_device(k_cache.device, k=k, v=v, v_cache=v_cache, slot_mapping=slot_mapping)
    if not num_tokens:
        return
    padded = triton.next_power_of_2(dim)
    reshape_and_cache_kernel[(num_tokens, kv_heads)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        BLOCK_SIZE=k_cache.shape[1],
        D=dim,
        D_PADDED=padded,
        num_warps=1,
    )
