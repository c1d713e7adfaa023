"""Copy whole blocks in all layers: the copy of copy-on-write.

    k_cache, v_cache  [layers, num_blocks, block_size, kv_heads, D]
    copies            (source, destination) pairs of block ids

One program a pair, layer and piece of a block. All copies run at once, so no block may be written twice, nor be both
a source and a destination. Least traffic: 2 * 2 * copies * layers * block bytes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import triton
import triton.language as tl

from mini_engine.kernels.checks import KernelInputError, check_contiguous, check_device, check_dtype, check_shape

PIECE = 2048  # elements a program moves of K, and as many of V: 16 bytes a thread and load at two bytes an element


def copy_blocks_reference(k_cache: torch.Tensor, v_cache: torch.Tensor, copies: Seq[tuple[int, int]]) -> None:
    for src, dst in copies:
        k_cache[:, dst] = k_cache[:, src]
        v_cache[:, dst] = v_cache[:, src]


@triton.jit
def copy_blocks_kernel(p_k, p_v, p_copies, stride_layer, block_numel, PIECE: tl.constexpr):
    i_copy, i_layer, i_piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # int64 before any product: layer * stride and block * elements pass 2^31 in pools of a few GB.
    src = tl.load(p_copies + 2 * i_copy).to(tl.int64)
    dst = tl.load(p_copies + 2 * i_copy + 1).to(tl.int64)
    o_element = i_piece * PIECE + tl.arange(0, PIECE)
    in_block = o_element < block_numel
    layer = i_layer.to(tl.int64) * stride_layer
    o_src = layer + src * block_numel + o_element
    o_dst = layer + dst * block_numel + o_element
    tl.store(p_k + o_dst, tl.load(p_k + o_src, mask=in_block), mask=in_block)
    tl.store(p_v + o_dst, tl.load(p_v + o_src, mask=in_block), mask=in_block)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, copies: Seq[tuple[int, int]]) -> None:
    """Copy block `source` to block `destination`, in all layers, for each pair. Raises KernelInputError."""
    if not copies:
        return
    num_layers, num_blocks = k_cache.shape[:2]
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_contiguous(k_cache=k_cache, v_cache=v_cache)
    check_device(k_cache.device, v_cache=v_cache)
    _check_copies(copies, num_blocks)
    device = k_cache.device
    pairs = torch.tensor(copies, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    numel = k_cache.stride(1)
    grid = (len(copies), num_layers, triton.cdiv(numel, PIECE))
    copy_blocks_kernel[grid](k_cache, v_cache, pairs, k_cache.stride(0), numel, PIECE=PIECE, num_warps=4)


def _check_copies(copies: Seq[tuple[int, int]], num_blocks: int) -> None:
    sources, destinations = {src for src, _ in copies}, [dst for _, dst in copies]
    outside = [block for pair in copies for block in pair if not 0 <= block < num_blocks]
    if outside:
        raise KernelInputError(f"block {outside[0]} to copy is outside the pool (0 to {num_blocks - 1})")
    clash = [dst for i, dst in enumerate(destinations) if dst in sources or dst in destinations[:i]]
    if clash:
        raise KernelInputError(
            f"block {clash[0]} is written by one copy and used by another; copies of one step run at once, "
            f"so make them two steps"
        )
