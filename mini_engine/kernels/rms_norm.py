"""Root-mean-square normalisation of rows.

    x       [T, N] or [T, heads, N]   heads of the QKV product: views with gaps are fine
    weight  [N]
    out     like x                    x / sqrt(mean(x^2) + eps), rounded, times weight

One program a row, which it reads once. Least traffic: 2 * rows * N * itemsize bytes, and the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mini_engine.kernels.checks import FLOATS, KernelInputError, check_device, check_dtype, check_rows, check_shape
from mini_engine.ops import rms_norm as rms_norm_reference

MAX_ROW = 16384  # elements: a longer row would not stay in registers

__all__ = ["rms_norm", "rms_norm_kernel", "rms_norm_reference"]


@triton.jit
def rms_norm_kernel(
    p_x,
    p_weight,
    p_out,
    eps,
    stride_token,
    stride_head,
    stride_out_token,
    stride_out_head,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_col = tl.arange(0, N_PADDED)
    in_row = o_col < N
    x = tl.load(p_x + i_token * stride_token + i_head * stride_head + o_col, mask=in_row, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + o_col, mask=in_row, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    # Rounded before the weight, as the model was trained: Llama's and Qwen3's code rounds there too.
    normed = normed.to(p_out.dtype.element_ty).to(tl.float32)
    out = (normed * weight).to(p_out.dtype.element_ty)
    tl.store(p_out + i_token * stride_out_token + i_head * stride_out_head + o_col, out, mask=in_row)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise the last dimension into `out` (x itself will do), or a new tensor. Raises KernelInputError."""
    n = x.shape[-1]
    if x.dim() not in (2, 3) or n > MAX_ROW:
        raise KernelInputError(f"x must be [T, N] or [T, heads, N] with N up to {MAX_ROW}, got {list(x.shape)}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_shape("weight", weight, n)
    check_shape("out", out, *x.shape)
    check_dtype("x", x, *FLOATS)
    check_dtype("weight", weight, x.dtype)
    check_dtype("out", out, x.dtype)
    check_rows(x=x, weight=weight, out=out)
    check_device(x.device, weight=weight, out=out)
    rows = (len(x), x.shape[1] if x.dim() == 3 else 1)
    if not out.numel():
        return out
    padded = triton.next_power_of_2(n)
    rms_norm_kernel[rows](
        x,
        weight,
        out,
        eps,
        *_row_strides(x),
        *_row_strides(out),
        N=n,
        N_PADDED=padded,
        num_warps=min(8, max(1, padded // 512)),
    )
    return out


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0
