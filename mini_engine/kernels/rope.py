"""Rotary position embedding, in place, in Hugging Face's half-split layout.

    x          [T, heads, D]     query and key heads of the QKV product: views with gaps are fine
    cos_sin    [length, 2, D]    of `rotary.rotary_table`: the cosine, and the sine with its first half negated
    positions  [T] int64

    out = x * cos + (x's halves swapped) * sin

One program a token and HEADS of its heads: the two rows of the table are read once for all of them.
Least traffic: 2 * T * heads * D * itemsize bytes, and one row of the table a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_engine.kernels.checks import (
    FLOATS,
    KernelInputError,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)
from mini_engine.ops import rotate

HEADS = 8


def rope_reference(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As the model does it; a new tensor."""
    cos, sin = cos_sin[positions].unsqueeze(1).unbind(2)
    return rotate(x, cos, sin)


@triton.jit(do_not_specialize_on_alignment=["p_positions"])
def rope_kernel(
    p_x,
    p_cos_sin,
    p_positions,
    num_heads,
    stride_token,
    stride_head,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_col = tl.arange(0, HALF_PADDED)
    in_half = o_col < HALF
    mask = (o_head < num_heads)[:, None] & in_half[None, :]

    p_cos = p_cos_sin + tl.load(p_positions + i_token) * (4 * HALF) + o_col
    cos_first = tl.load(p_cos, mask=in_half, other=0.0).to(tl.float32)
    cos_second = tl.load(p_cos + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_first = tl.load(p_cos + 2 * HALF, mask=in_half, other=0.0).to(tl.float32)
    sin_second = tl.load(p_cos + 3 * HALF, mask=in_half, other=0.0).to(tl.float32)

    # Both halves are in registers before either is stored: in place is safe.
    p_first = p_x + i_token * stride_token + o_head[:, None] * stride_head + o_col[None, :]
    first = tl.load(p_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(p_first + HALF, mask=mask, other=0.0).to(tl.float32)
    new_first = first * cos_first[None, :] + second * sin_first[None, :]
    new_second = second * cos_second[None, :] + first * sin_second[None, :]
    tl.store(p_first, new_first.to(p_x.dtype.element_ty), mask=mask)
    tl.store(p_first + HALF, new_second.to(p_x.dtype.element_ty), mask=mask)


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, D] in place, and return it. Raises KernelInputError."""
    num_tokens, num_heads, dim = x.shape
    if dim % 2:
        raise KernelInputError(f"rotary embedding needs an even head size, got {dim}")
    check_shape("cos_sin", cos_sin, None, 2, dim)
    check_shape("positions", positions, num_tokens)
    check_dtype("x", x, *FLOATS)
    check_dtype("cos_sin", cos_sin, *FLOATS)
    check_dtype("positions", positions, torch.int64)
    check_rows(x=x)
    check_contiguous(cos_sin=cos_sin)
    check_device(x.device, cos_sin=cos_sin, positions=positions)
    if not x.numel():
        return x
    half = dim // 2
    rope_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
        x,
        cos_sin,
        positions,
        num_heads,
        x.stride(0),
        x.stride(1),
        HEADS=HEADS,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        num_warps=1,
    )
    return x
