"""One sequence's next token on a CPU: attention in as few operators as it takes.

The work is so small that starting an operator costs more than what most of them do. So the views of K and V are made
for all layers at once, and a layer is left with two products and a softmax.

    k of layer i    [kv_heads, D, L]       q [kv_heads, group, D]  ->  scores  ->  weights  ->  out [1, heads, D]
    v of layer i    [kv_heads, L, D]

It takes a sequence whose blocks lie side by side in the pool, so that its cache is one piece.
"""

from __future__ import annotations

import torch

from mini_engine.attention import block_run
from mini_engine.batch import Batch
from mini_engine.kv_cache import KVCache


class SingleDecode:
    """See `ops.Ops.attention`. first: slot of the sequence's first token; length: its tokens, the new one included."""

    def __init__(self, kv: KVCache, first: int, length: int, scale: float):
        k, v = (cache.flatten(1, 2)[:, first : first + length] for cache in (kv.k, kv.v))
        self.keys, self.values = k.permute(0, 2, 3, 1).unbind(0), v.transpose(1, 2).unbind(0)
        self.scale = scale
        self._unused = k.new_empty(1, 1, 1)  # baddbmm's first operand, which beta = 0 leaves unread

    @classmethod
    def of(cls, batch: Batch, kv: KVCache, scale: float, dtype: torch.dtype) -> SingleDecode | None:
        """None for any other batch, for blocks that do not lie side by side, and for a cache of another dtype."""
        if batch.query_lens != (1,) or kv.k.device.type != "cpu" or kv.k.dtype != dtype:
            return None
        blocks = block_run(batch.block_table[0, : -(-batch.max_seq_len // kv.block_size)])
        return None if blocks is None else cls(kv, blocks.start * kv.block_size, batch.max_seq_len, scale)

    def __call__(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [1, heads, Dq] -> [1, heads, Dv]."""
        keys, values = self.keys[layer], self.values[layer]
        packed = q.view(keys.shape[0], -1, keys.shape[1])
        scores = torch.baddbmm(self._unused, packed, keys, beta=0, alpha=self.scale)
        return torch.bmm(torch.softmax(scores, -1), values).view(1, q.shape[1], -1)
