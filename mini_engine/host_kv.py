"""The tensors behind the host's slots: K and V of preempted sequences (`swap.py`), then of prefixes that the pool gave
up (`prefix_tier.py`).

k, v   [num_slots, layers, block_size, kv_heads, head_dim]      a slot lies in one piece, so it crosses the link in one
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from mini_engine.block import BlockCopy
from mini_engine.kv_cache import KVCache


class HostKV:
    """Room for `num_slots` blocks of `kv` in host memory, pinned if the pool is on a GPU."""

    def __init__(self, kv: KVCache, num_slots: int):
        layers, _, *rest = kv.k.shape
        shape = (num_slots, layers, *rest)
        pinned = kv.k.device.type == "cuda"
        self.k = torch.empty(shape, dtype=kv.k.dtype, pin_memory=pinned)
        self.v = torch.empty(shape, dtype=kv.v.dtype, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @torch.inference_mode()
    def move(self, kv: KVCache, swap_out: Seq[BlockCopy], swap_in: Seq[BlockCopy]) -> None:
        """Copy (block, slot) pairs to the host, then (slot, block) pairs back; on a GPU, in its current stream."""
        for block, slot in swap_out:
            self.k[slot].copy_(kv.k[:, block], non_blocking=True)
            self.v[slot].copy_(kv.v[:, block], non_blocking=True)
        for slot, block in swap_in:
            kv.k[:, block].copy_(self.k[slot], non_blocking=True)
            kv.v[:, block].copy_(self.v[slot], non_blocking=True)
