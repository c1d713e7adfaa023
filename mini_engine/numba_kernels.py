"""The CPU kernels: what a decoder layer does beside its matrix products, in plain loops that Numba compiles.

    rms_norm     rope     swiglu     write: K and V into their slots
    decode_attention: over parts of the paged cache, in place     merge: of the parts

A decode step on a CPU has little work between two products, and torch needs many operators for it: to start one costs
more than what most of them do. Here each is one call.

As in the Triton kernels, an argument p_x is an address, and strides count elements. All data are float32;
`numba_ops.py` checks shapes and dtypes. Numba keeps the machine code on disk: the first import on a machine takes ten
seconds, later ones half of one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

# Sums may be taken in another order, as vectors need it; infinities and NaN keep their meaning.
compiled: Any = partial(njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

torch_threads = torch.get_num_threads()  # Numba sets what OpenMP uses, torch too, to all cores when it compiles prange

F0, F1, HALF = np.float32(0), np.float32(1), np.float32(0.5)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An integer as a C pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@compiled
def floats(address, first, length):
    """The float32 numbers there from the `first` on, as an array."""
    return carray(_pointer(address + 4 * first), (length,), np.float32)


@compiled
def ints(address, first, length):
    return carray(_pointer(address + 4 * first), (length,), np.int32)


@compiled
def longs(address, first, length):
    return carray(_pointer(address + 8 * first), (length,), np.int64)


@compiled("f4(f4)", fastmath={"contract", "nsz"})  # the order of the two parts of ln(2) matters
def exp(x):
    """e^x within 2e-7 of itself: 2^n times a polynomial in what is left, at most ln(2)/2. Neither branch nor call, so
    that a loop of it runs on vectors. x is taken as -87 below that, where e^x is 1e-38.

    Source of the polynomial: the Cephes library's expf (Moshier 1992).
    """
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * np.float32(1.44269504) + HALF)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)  # ln(2) in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + F1
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, f8)")
def rms_norm(p_x, x_stride, p_weight, p_out, out_stride, rows, heads, size, eps):
    """out = x / sqrt(mean(x²) + eps) · weight of each head. x and out [rows, heads, size], perhaps the same, with rows
    x_stride and out_stride apart."""
    weight = floats(p_weight, 0, size)
    for row in range(rows):
        for head in range(heads):
            x = floats(p_x, row * x_stride + head * size, size)
            out = floats(p_out, row * out_stride + head * size, size)
            total = F0
            for i in range(size):
                total += x[i] * x[i]
            scale = F1 / np.sqrt(total / np.float32(size) + np.float32(eps))
            for i in range(size):
                out[i] = x[i] * scale * weight[i]


@compiled("void(i8, i8, i8, i8, i8, i8, i8)")
def rope(p_x, x_stride, p_cos_sin, p_positions, rows, heads, size):
    """Rotates x [rows, heads, size] where it lies, half-split. cos_sin [positions, 2, size], see `rotary_table`;
    positions [rows] int64."""
    half = size // 2
    for row in range(rows):
        table = longs(p_positions, row, 1)[0] * 2 * size
        cos, sin = floats(p_cos_sin, table, size), floats(p_cos_sin, table + size, size)
        for head in range(heads):
            x = floats(p_x, row * x_stride + head * size, size)
            for i in range(half):
                a, b = x[i], x[half + i]
                x[i] = a * cos[i] + b * sin[i]
                x[half + i] = b * cos[half + i] + a * sin[half + i]


@compiled("void(i8, i8, i8, i8)")
def swiglu(p_x, p_out, rows, size):
    """out [rows, size] = silu(gate) · up of x [rows, 2 size], gate first."""
    for row in range(rows):
        gate, up = floats(p_x, row * 2 * size, size), floats(p_x, row * 2 * size + size, size)
        out = floats(p_out, row * size, size)
        for i in range(size):
            out[i] = gate[i] / (F1 + exp(-gate[i])) * up[i]


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def write(p_k, k_stride, p_v, v_stride, p_k_cache, p_v_cache, p_slots, rows, size):
    """Copies k and v [rows, size], rows k_stride and v_stride apart, to caches [slots, size]; slots [rows] int64."""
    slots = longs(p_slots, 0, rows)
    for row in range(rows):
        k, v = floats(p_k, row * k_stride, size), floats(p_v, row * v_stride, size)
        k_out, v_out = floats(p_k_cache, slots[row] * size, size), floats(p_v_cache, slots[row] * size, size)
        for i in range(size):
            k_out[i] = k[i]
            v_out[i] = v[i]


class AttentionArguments(NamedTuple):
    """What decode attention reads and writes.

    items [items, 3] int32: a sequence's row, and the tokens [start, end) of its context to attend to
    q [rows, kv_heads * group, size] with rows q_stride apart       parts [items, heads, size], lses [items, heads]
    k, v [blocks, block_size, kv_heads, size] of one layer          table [rows, width] int32
    firsts [rows + 1] int32: of a row's items the first             out [rows, heads, size]
    """

    items: int
    p_items: int
    p_q: int
    q_stride: int
    p_k: int
    p_v: int
    p_table: int
    width: int
    p_parts: int
    p_lses: int
    rows: int
    p_firsts: int
    p_out: int
    kv_heads: int
    group: int
    size: int
    block_size: int


COUNT = len(AttentionArguments._fields)


@compiled
def arguments(address):
    """Those that lie there as int64. Numba takes 5 µs to look at so many between two products, at an address none."""
    return AttentionArguments(*to_fixed_tuple(longs(address, 0, COUNT), COUNT))


@compiled(inline="always")
def attend_to(item, a, size, scale):
    """One query token against one split of its context, read where it lies.

    A token's K of all heads lie side by side, so the tokens are the outer loop: memory is read front to back.
    """
    row, first, end = ints(a.p_items, 3 * item, 3)
    heads, token, length = a.kv_heads * a.group, a.kv_heads * size, end - first
    table = ints(a.p_table, row * a.width, a.width)
    scores = np.empty(heads * length, np.float32)  # of head 0, then of head 1, ...
    for i in range(length):
        block = table[(first + i) // a.block_size] * a.block_size + (first + i) % a.block_size
        for head in range(heads):
            k = floats(a.p_k, block * token + head // a.group * size, size)
            q = floats(a.p_q, row * a.q_stride + head * size, size)
            dot = F0
            for d in range(size):
                dot += q[d] * k[d]
            scores[head * length + i] = dot * np.float32(scale)
    for head in range(heads):
        weights = scores[head * length : (head + 1) * length]
        top = weights[0]
        for i in range(length):
            top = max(top, weights[i])
        total = F0
        for i in range(length):
            weights[i] = exp(weights[i] - top)
            total += weights[i]
        share = F1 / total
        for i in range(length):
            weights[i] *= share
        floats(a.p_lses, item * heads + head, 1)[0] = top + np.log(total)
        out = floats(a.p_parts, (item * heads + head) * size, size)
        for d in range(size):
            out[d] = F0
    for i in range(length):
        block = table[(first + i) // a.block_size] * a.block_size + (first + i) % a.block_size
        for head in range(heads):
            v = floats(a.p_v, block * token + head // a.group * size, size)
            out = floats(a.p_parts, (item * heads + head) * size, size)
            weight = scores[head * length + i]
            for d in range(size):
                out[d] += weight * v[d]


@compiled
def attend(item, p_arguments, scale):
    """`attend_to`, with the usual head sizes known when compiling: then its inner loops have no ends to look out for,
    which takes a fifth less time."""
    a = arguments(p_arguments)
    if a.size == 64:
        attend_to(item, a, 64, scale)
    elif a.size == 128:
        attend_to(item, a, 128, scale)
    else:
        attend_to(item, a, a.size, scale)


@compiled
def merge(p_arguments):
    """The states over the parts of each sequence's context into the one over all of it, as `attention.merge` does."""
    a = arguments(p_arguments)
    if a.items == a.rows:
        return
    heads, size = a.kv_heads * a.group, a.size
    for row in range(a.rows):
        first, end = ints(a.p_firsts, row, 2)
        for head in range(heads):
            top = floats(a.p_lses, first * heads + head, 1)[0]
            for item in range(first, end):
                top = max(top, floats(a.p_lses, item * heads + head, 1)[0])
            total = F0
            out = floats(a.p_out, (row * heads + head) * size, size)
            for d in range(size):
                out[d] = F0
            for item in range(first, end):
                weight = exp(floats(a.p_lses, item * heads + head, 1)[0] - top)
                total += weight
                part = floats(a.p_parts, (item * heads + head) * size, size)
                for d in range(size):
                    out[d] += weight * part[d]
            for d in range(size):
                out[d] /= total


@compiled("void(i8, f8)")
def decode_attention(p_arguments, scale):
    """`attend` for one item after the other, then `merge`."""
    for item in range(arguments(p_arguments).items):
        attend(item, p_arguments, scale)
    merge(p_arguments)


@compiled("void(i8, f8)", parallel=True)
def decode_attention_parallel(p_arguments, scale):
    """The same, the items shared out to threads."""
    for item in prange(arguments(p_arguments).items):
        attend(item, p_arguments, scale)
    merge(p_arguments)


torch.set_num_threads(torch_threads)
