"""The Triton backend: the same steps as `ops.TorchOps`, by the kernels. Heads are normed and rotated where they lie."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from mini_engine.attention import AttentionState
from mini_engine.batch import Batch
from mini_engine.block_pool import BlockCopy
from mini_engine.kernels.copy_blocks import copy_blocks
from mini_engine.kernels.merge import merge_states
from mini_engine.kernels.reshape_and_cache import reshape_and_cache
from mini_engine.kernels.rms_norm import rms_norm
from mini_engine.kernels.rope import rope
from mini_engine.kernels.swiglu import swiglu
from mini_engine.kv_cache import KVCache
from mini_engine.ops import Attention, Contexts, StateAttention
from mini_engine.triton_attention import TritonAttention, rows_of
from mini_engine.triton_mla import TritonMLAAttention


class TritonOps:
    """See `ops.Ops`."""

    replayable = True

    def attention(self, batch: Batch, kv: KVCache, scale: float, dtype: torch.dtype) -> Attention:
        states = _paged(batch, kv, scale, dtype)
        return lambda layer, q: states(layer, q).out

    def context_attention(self, contexts: Contexts, kv: KVCache, scale: float) -> StateAttention:
        """A new token that sees a whole context is one whose sequence ends with it: every token is a row of its own."""
        return _paged(rows_of(contexts), kv, scale, torch.float32)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
        return merge_states(outs.float(), lses)

    def copy_blocks(self, kv: KVCache, copies: Seq[BlockCopy]) -> None:
        copy_blocks(kv.pools[0], kv.pools[-1], copies)  # of a latent cache the one pool, twice the same

    def write(self, kv: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if kv.is_latent:
            v = k
        reshape_and_cache(k, v, kv.pools[0][layer], kv.pools[-1][layer], slot_mapping)

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


def _paged(batch: Batch, kv: KVCache, scale: float, out_dtype: torch.dtype) -> StateAttention:
    """The kernel for what the cache holds."""
    attention = (TritonMLAAttention if kv.is_latent else TritonAttention)(batch, scale, out_dtype)
    return lambda layer, q: attention(q, *kv.layers[layer])
