"""The tensors behind the host's slots: K and V of preempted sequences (`swap.py`), then of prefixes that the pool gave
up (`prefix_tier.py`).

pools   [num_slots, layers, block_size, kv_heads, head_dim] of K, and of V

A slot lies in one piece, so it crosses the link in one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from mini_engine.block import BlockCopy
from mini_engine.kv_cache import KVCache


class HostKV:
    """Room for `num_slots` blocks of `kv` in host memory, pinned if the pool is on a GPU."""

    def __init__(self, kv: KVCache, num_slots: int):
        pinned = kv.k.device.type == "cuda"
        shapes = [(num_slots, pool.shape[0], *pool.shape[2:]) for pool in kv.pools]
        self.pools = [torch.empty(shape, dtype=kv.k.dtype, pin_memory=pinned) for shape in shapes]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @torch.inference_mode()
    def move(self, kv: KVCache, swap_out: Seq[BlockCopy], swap_in: Seq[BlockCopy]) -> None:
        """Copy (block, slot) pairs to the host, then (slot, block) pairs back; on a GPU, in its current stream."""
        for host, pool in zip(self.pools, kv.pools, strict=True):
            for block, slot in swap_out:
                host[slot].copy_(pool[:, block], non_blocking=True)
            for slot, block in swap_in:
                pool[:, block].copy_(host[slot], non_blocking=True)
