"""What a decoder layer calls attention: store the new tokens' K and V, and attend over all of their sequences.

    attention(layer, q [T, heads, Dq], k [T, kv_heads, Dq], v [T, kv_heads, Dv]) -> out [T, heads, Dv]

Made once a step. `PagedLayers` is that of a rank which holds whole contexts; where a context is cut over ranks it is
`context_parallel.ContextParallelLayers`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from mini_engine.attention import gather_tokens
from mini_engine.batch import Batch, select_sequences
from mini_engine.kv_cache import KVCache
from mini_engine.ops import Ops


class LayerAttention(Protocol):
    kv: KVCache

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...

    def context(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K [kv_heads, L, Dk] and V [kv_heads, L, Dv] of what sequence `row` of the batch had before this step: for
        forms of attention that need more than its result. Tokens may come in any order."""
        ...

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The first half of a call: K and V of the new tokens, for who attends by himself."""
        ...

    def only(self, rows: Seq[int]) -> LayerAttention:
        """That of some sequences of the batch, in ascending order: q, k and v are then of their tokens alone."""
        ...


class PagedLayers:
    """One rank with whole contexts, on the backend's paged attention."""

    def __init__(self, batch: Batch, kv: KVCache, ops: Ops, scale: float, dtype: torch.dtype):
        self.batch, self.kv, self.ops = batch, kv, ops
        self._settings = (kv, ops, scale, dtype)
        self.paged = ops.attention(batch, kv, scale, dtype)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.store(layer, k, v)
        return self.paged(layer, q)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.ops.write(self.kv, layer, k, v, self.batch.slot_mapping)

    def only(self, rows: Seq[int]) -> PagedLayers:
        return PagedLayers(select_sequences(self.batch, rows), *self._settings)

    def context(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        length, table = self.batch.context_lens[row], self.batch.block_table[row]
        k, v = (gather_tokens(cache, table, length).transpose(0, 1) for cache in self.kv.layers[layer])
        return k, v
