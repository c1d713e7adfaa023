"""The gated activation between the two products of the MLP: silu(gate) * up.

    gate_up  [T, 2 * N]   gate in the first half of a row, up in the second: one product makes both
    out      [T, N]

One program a piece of a row. Least traffic: 3 * T * N * itemsize bytes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mini_engine.kernels.checks import FLOATS, KernelInputError, check_dtype, check_rows

PIECE = 1024  # elements of the output a program makes: 16 bytes a thread at two bytes an element and 4 warps


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@triton.jit
def swiglu_kernel(p_gate_up, p_out, stride_token, n, PIECE: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    in_row = o_col < n
    p_gate = p_gate_up + i_token * stride_token + o_col
    gate = tl.load(p_gate, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(p_gate + n, mask=in_row, other=0.0).to(tl.float32)
    # Rounded between the two steps, as two operators do it.
    silu = (gate / (1.0 + tl.exp(-gate))).to(p_out.dtype.element_ty).to(tl.float32)
    tl.store(p_out + i_token * n + o_col, (silu * up).to(p_out.dtype.element_ty), mask=in_row)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of each row [T, 2 * N]; a new tensor [T, N]. Raises KernelInputError."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise KernelInputError(f"gate_up must be [T, 2 * N], got {list(gate_up.shape)}")
    check_dtype("gate_up", gate_up, *FLOATS)
    check_rows(gate_up=gate_up)
    num_tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, n), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(n, PIECE))
        swiglu_kernel[grid](gate_up, out, gate_up.stride(0), n, PIECE=PIECE, num_warps=4)
    return out
