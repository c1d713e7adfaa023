"""Merge attention states over disjoint keys into the state over all of them: splits, cascades, ranks.

    outs  [P, T, heads, D] float32   parts; where lse is -inf the row may never have been written
    lses  [P, T, heads]    float32   natural log
    out   [T, heads, D], lse [T, heads]

    top = max(lses)    total = sum(exp(lses - top))
    out = sum(outs * (exp(lses - top) / total))    lse = top + log(total)

One program a token and head. The weight is divided by the total before it multiplies, so that no sum can overflow.
A part whose lse is -inf, +inf or NaN counts as empty; a row of empty parts is (0, -inf).
Least traffic: the parts that are not empty read once, out written once.
"""

from __future__ import annotations

from functools import reduce

import torch
import triton
import triton.language as tl

from mini_engine.attention import AttentionState, merge
from mini_engine.kernels.checks import FLOATS, check_contiguous, check_device, check_dtype, check_shape


def merge_reference(outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
    """The pairwise merge of the engine, from part to part."""
    return reduce(merge, (AttentionState(out, lse) for out, lse in zip(outs, lses, strict=True)))


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def merge_kernel(
    p_outs,
    p_lses,
    p_out,
    p_lse,
    num_parts,
    num_rows,
    PARTS_PADDED: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    rows = num_rows.to(tl.int64)
    o_part = tl.arange(0, PARTS_PADDED)
    EMPTY: tl.constexpr = float("-inf")
    lses = tl.load(p_lses + o_part * rows + i_row, mask=o_part < num_parts, other=EMPTY)
    lses = tl.where(lses < float("inf"), lses, EMPTY)
    top = tl.max(lses, axis=0)
    top = tl.where(top == EMPTY, 0.0, top)
    total = tl.sum(tl.exp(lses - top), axis=0)
    filled = total > 0.0
    total = tl.where(filled, total, 1.0)

    o_dim = tl.arange(0, D_PADDED)
    in_head = o_dim < D
    acc = tl.zeros([D_PADDED], dtype=tl.float32)
    for i_part in range(0, num_parts):
        row = i_part * rows + i_row
        lse = tl.load(p_lses + row)
        if (lse > EMPTY) & (lse < float("inf")):  # an empty part is not read: it may never have been written
            part = tl.load(p_outs + row * D + o_dim, mask=in_head, other=0.0)
            acc += part * (tl.exp(lse - top) / total)
    tl.store(p_out + i_row * D + o_dim, acc.to(p_out.dtype.element_ty), mask=in_head)
    tl.store(p_lse + i_row, tl.where(filled, top + tl.log(total), EMPTY))


def merge_states(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> AttentionState:
    """Merge P states. out and lse are made (in float32) where none are given. Raises KernelInputError."""
    num_parts, num_tokens, heads, dim = outs.shape
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=torch.float32, device=outs.device)
    if lse is None:
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    check_shape("lses", lses, num_parts, num_tokens, heads)
    check_shape("out", out, num_tokens, heads, dim)
    check_shape("lse", lse, num_tokens, heads)
    check_dtype("outs", outs, torch.float32)
    check_dtype("lses", lses, torch.float32)
    check_dtype("out", out, *FLOATS)
    check_dtype("lse", lse, torch.float32)
    check_contiguous(outs=outs, lses=lses, out=out, lse=lse)
    check_device(outs.device, lses=lses, out=out, lse=lse)
    if out.numel():
        merge_kernel[(num_tokens * heads,)](
            outs,
            lses,
            out,
            lse,
            num_parts,
            num_tokens * heads,
            PARTS_PADDED=triton.next_power_of_2(num_parts),
            D=dim,
            D_PADDED=triton.next_power_of_2(dim),
            num_warps=1,
        )
    return AttentionState(out, lse)
