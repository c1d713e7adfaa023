"""The tensors behind the block ids: keys and values of every layer, in blocks.

k, v   [layers, num_blocks, block_size, kv_heads, head_dim]      block 0 is the null block
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from mini_engine.block_manager import BlockCopy
from mini_engine.config import ModelConfig


class KVCache:
    """K and V of all layers. `slot = block_id * block_size + offset` names one token's place in every layer."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        shape = (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V one token holds in all layers."""
        num_blocks, block_size = self.k.shape[1:3]
        return self.nbytes // (num_blocks * block_size)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at their slots."""
        self.k[layer].flatten(0, 1).index_copy_(0, slot_mapping, k.to(self.k.dtype))
        self.v[layer].flatten(0, 1).index_copy_(0, slot_mapping, v.to(self.v.dtype))

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """Copy whole blocks in all layers. Every source is read before any destination is written."""
        if copies:
            src, dst = torch.tensor(copies, device=self.k.device).unbind(1)
            self.k[:, dst] = self.k[:, src]
            self.v[:, dst] = self.v[:, src]
