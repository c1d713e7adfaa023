"""The Triton backend: the same steps as `ops.TorchOps`, by the kernels. Heads are normed and rotated where they lie."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from mini_engine.batch import Batch
from mini_engine.block_pool import BlockCopy
from mini_engine.kernels.copy_blocks import copy_blocks
from mini_engine.kernels.reshape_and_cache import reshape_and_cache
from mini_engine.kernels.rms_norm import rms_norm
from mini_engine.kernels.rope import rope
from mini_engine.kernels.swiglu import swiglu
from mini_engine.kv_cache import KVCache
from mini_engine.triton_attention import TritonAttention


class TritonOps:
    """See `ops.Ops`."""

    replayable = True

    def attention(self, batch: Batch, block_size: int, scale: float, dtype: torch.dtype) -> TritonAttention:
        return TritonAttention(batch, scale, out_dtype=dtype)

    def copy_blocks(self, kv: KVCache, copies: Seq[BlockCopy]) -> None:
        copy_blocks(kv.k, kv.v, copies)

    def write(self, kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        reshape_and_cache(k, v, kv.k[layer], kv.v[layer], slot_mapping)

    def rotary(self, cos_sin: torch.Tensor, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda qk: rope(qk, cos_sin, positions)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def qk_norm(
        self, qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: int, eps: float
    ) -> torch.Tensor:
        rms_norm(qk[:, :heads], q_weight, eps, out=qk[:, :heads])
        rms_norm(qk[:, heads:], k_weight, eps, out=qk[:, heads:])
        return qk

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up)
