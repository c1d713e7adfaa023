"""The CPU backend: the same steps as `ops.TorchOps`, by the kernels that Numba compiles, for float32 models.

What the kernels were not written for goes torch's way: other dtypes, latent caches, chunks of several tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from mini_engine import numba_kernels as kernels
from mini_engine.attention import TorchAttention
from mini_engine.batch import Batch, select_sequences
from mini_engine.kv_cache import KVCache
from mini_engine.ops import Attention, TorchOps

SPLIT = 128
ARGUMENTS = np.dtype([(name, np.int64) for name in kernels.AttentionArguments._fields])
numba_config: Any = numba.config


class NumbaOps(TorchOps):
    """See `ops.Ops`."""

    def attention(self, batch: Batch, kv: KVCache, scale: float, dtype: torch.dtype) -> Attention:
        if not (_takes(kv) and dtype == torch.float32 and batch.num_decodes):
            return super().attention(batch, kv, scale, dtype)
        n, num_sequences = batch.num_decodes, len(batch.query_lens)
        decodes = DecodeAttention(batch, kv, scale)
        if n == num_sequences:
            return decodes
        chunks = TorchAttention(select_sequences(batch, range(n, num_sequences)), kv.block_size, scale)
        return lambda layer, q: torch.cat((decodes(layer, q[:n]), chunks(q[n:], *kv.layers[layer]).out))

    def write(self, kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if not (_takes(kv) and _is_packed(k) and _is_packed(v)):
            return super().write(kv, layer, k, v, slot_mapping)
        kernels.write(*_write_arguments(kv.layers[layer], k, v, slot_mapping))

    def rotary(self, cos_sin: torch.Tensor, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        by_torch = super().rotary(cos_sin, positions)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            if not _is_packed(x) or cos_sin.dtype != torch.float32:
                return by_torch(x)
            kernels.rope(x.data_ptr(), x.stride(0), cos_sin.data_ptr(), positions.data_ptr(), *x.shape)
            return x

        return rotate

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dim() != 2 or not x.dtype == weight.dtype == torch.float32 or x.stride(1) != 1:
            return super().rms_norm(x, weight, eps)
        rows, size = x.shape
        out = torch.empty(rows, size, dtype=x.dtype)
        kernels.rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), size, rows, 1, size, eps)
        return out

    def qk_norm(
        self, qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, eps: float
    ) -> torch.Tensor:
        if not _is_packed(qk):
            return super().qk_norm(qk, q_weight, k_weight, heads, eps)
        for x, weight in ((qk[:, :heads], q_weight), (qk[:, heads:], k_weight)):
            p_x, stride = x.data_ptr(), x.stride(0)
            kernels.rms_norm(p_x, stride, weight.data_ptr(), p_x, stride, *x.shape, eps)
        return qk

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dtype != torch.float32 or not gate_up.is_contiguous():
            return super().swiglu(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, size, dtype=gate_up.dtype)
        kernels.swiglu(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out


class DecodeAttention:
    """Of the sequences at the front of a batch that have one new token each. Made once a step, called once a layer; its
    result is good until the next call.

    A context is cut into even splits of at most SPLIT tokens, the work is shared out by splits, and their states are
    merged. Where the cuts are depends on a sequence's length alone, so that its result does not change with batch or
    machine.
    """

    def __init__(self, batch: Batch, kv: KVCache, scale: float):
        self.batch, self.kv, self.scale = batch, kv, scale
        lens = np.array(batch.context_lens[: batch.num_decodes]) + 1
        splits = -(-lens // SPLIT)
        self.firsts = np.zeros(len(lens) + 1, np.int32)
        np.cumsum(splits, out=self.firsts[1:])
        rows = np.repeat(np.arange(len(lens)), splits)
        sizes = -(-lens // splits)[rows]
        starts = (np.arange(len(rows)) - self.firsts[rows]) * sizes
        self.items = np.stack((rows, starts, np.minimum(starts + sizes, lens[rows])), 1).astype(np.int32)
        self.arguments = np.zeros(len(kv.layers), ARGUMENTS)
        first, size = self.arguments.ctypes.data, self.arguments.itemsize
        self.p_arguments = range(first, first + len(kv.layers) * size, size)
        self.out = torch.empty(0)
        self.kernel = kernels.decode_attention
        if _has_openmp():  # of a single split too: the two kernels may round differently
            numba.set_num_threads(min(torch.get_num_threads(), numba_config.NUMBA_NUM_THREADS))
            self.kernel = kernels.decode_attention_parallel

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [num_decodes, heads, D] -> [num_decodes, heads, D]."""
        if not _is_packed(q):
            q = q.contiguous()
        if not len(self.out):
            self._allocate(q)
        self.arguments["p_q"][layer], self.arguments["q_stride"][layer] = q.data_ptr(), q.stride(0)
        self.kernel(self.p_arguments[layer], self.scale)
        return self.out

    def by_layer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """(layer) -> K and V are in their slots, and the result [num_decodes, heads * D]: for layers that all put q, k
        and v in these places.

        What the kernels take is looked up here, for all layers in one go. Between two products, which push Python's own
        code out of the caches, that took longer than attention.
        """
        self._allocate(q)
        writes = [_write_arguments(pools, k, v, self.batch.slot_mapping) for pools in self.kv.layers]
        out = self.out.flatten(1)

        def attend(layer: int) -> torch.Tensor:
            kernels.write(*writes[layer])
            self.kernel(self.p_arguments[layer], self.scale)
            return out

        return attend

    def _allocate(self, q: torch.Tensor) -> None:
        """Where results go; what is then known of the arguments."""
        rows, heads, size = q.shape
        table, items = self.batch.block_table, len(self.items)
        _, block_size, kv_heads, _ = self.kv.layers[0][0].shape
        self.parts, self.lses = torch.empty(items, heads, size), torch.empty(items, heads)
        self.out = self.parts if items == rows else torch.empty(rows, heads, size)
        arguments = {
            "items": items,
            "p_items": self.items.ctypes.data,
            "p_q": q.data_ptr(),
            "q_stride": q.stride(0),
            "p_k": [k.data_ptr() for k, _ in self.kv.layers],
            "p_v": [v.data_ptr() for _, v in self.kv.layers],
            "p_table": table.data_ptr(),
            "width": table.shape[1],
            "p_parts": self.parts.data_ptr(),
            "p_lses": self.lses.data_ptr(),
            "rows": rows,
            "p_firsts": self.firsts.ctypes.data,
            "p_out": self.out.data_ptr(),
            "kv_heads": kv_heads,
            "group": heads // kv_heads,
            "size": size,
            "block_size": block_size,
        }
        for name, value in arguments.items():
            self.arguments[name] = value


def _takes(kv: KVCache) -> bool:
    """Whether the kernels can read and write this cache."""
    return kv.k.dtype == torch.float32 and kv.k.shape == kv.v.shape


def _write_arguments(
    pools: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[int, ...]:
    new, places = (k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)), (pool.data_ptr() for pool in pools)
    return *new, *places, slot_mapping.data_ptr(), k.shape[0], k.shape[1] * k.shape[2]


def _is_packed(x: torch.Tensor) -> bool:
    """Whether x [rows, heads, size] is float32 with the heads of a row side by side."""
    return x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


@cache
def _has_openmp() -> bool:
    """Whether Numba's OpenMP layer is here. Its other layer ends the process when two threads use it at a time."""
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:
        return False
    numba_config.THREADING_LAYER = "omp"
    return True
