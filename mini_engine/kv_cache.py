"""The tensors behind the block ids: keys and values of every layer, in blocks.

k, v   [layers, num_blocks, block_size, kv_heads, head_dim]      block 0 is the null block

Latent attention (MLA) keeps one latent a token: k [layers, num_blocks, block_size, 1, kv_lora_rank + rope], and v is
the view of its first kv_lora_rank elements.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence as Seq

import torch

from mini_engine.block_pool import BlockCopy
from mini_engine.config import ModelConfig


class KVCache:
    """K and V of all layers; `layers[i]` are views of those of layer i. config: of the part of the model that is here.

    is_latent: v is a view of k, so that storing k stores both. pools: the tensors that hold it all.
    `slot = block_id * block_size + offset` names one token's place in every layer.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        shape = (config.num_hidden_layers, num_blocks, block_size, config.cached_heads)
        self.block_size = block_size
        self.is_latent = config.cached_value_dim == 0
        self.k = _zeros((*shape, config.cached_key_dim), dtype, device)
        if self.is_latent:
            self.v = self.k[..., : config.cached_value_view]
        else:
            self.v = _zeros((*shape, config.cached_value_dim), dtype, device)
        self.pools = [self.k] if self.is_latent else [self.k, self.v]
        self.layers = list(zip(self.k.unbind(0), self.v.unbind(0), strict=True))
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.layers]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V one token holds in all layers."""
        num_blocks, block_size = self.k.shape[1:3]
        return self.nbytes // (num_blocks * block_size)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """K or V as it comes back from the cache, in x's dtype: for who attends to new tokens without reading them."""
        return x.to(self.k.dtype).to(x.dtype)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k [T, kv_heads, D] and v at their slots; of a latent, k alone."""
        k_slots, v_slots = self._slots[layer]
        k_slots.index_copy_(0, slot_mapping, k.to(self.k.dtype))
        if not self.is_latent:
            v_slots.index_copy_(0, slot_mapping, v.to(self.v.dtype))

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """Copy whole blocks in all layers. Every source is read before any destination is written."""
        if copies:
            src, dst = torch.tensor(copies, device=self.k.device).unbind(1)
            for pool in self.pools:
                pool[:, dst] = pool[:, src]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the pages are the operating system's, which hands them out when they are first written to, where
    torch.zeros would touch the whole pool at once. Small pages: a pool has each layer's K and V far apart, so that of
    huge ones (2 MiB) the first token would take one for each, 120 MiB of SmolLM2."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
