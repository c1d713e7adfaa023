"""One decode step over a context cut across ranks, small enough to look into (chapter 10, exercise 10-1).

one request, one KV head, H query heads dealt out to N ranks; `length` tokens cached, one token new
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mini_engine.attention import AttentionState, attend
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import CommBackend, context_attention, context_parallel_attention
from mini_engine.groups import Group, LocalGroup, run_ranks

BLOCK_SIZE = 4


@dataclass(frozen=True)
class DecodeStep:
    """q [1, H, D]; keys, values [length + 1, 1, D], the new token's last. Seeded; sharp scores single out few keys."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, length: int, heads: int = 8, dim: int = 16, sharpness: float = 2.0, seed: int = 0) -> DecodeStep:
        generator = torch.Generator().manual_seed(seed)
        q, keys, values = (torch.randn(n, h, dim, generator=generator) for n, h in
                           ((1, heads), (length + 1, 1), (length + 1, 1)))  # fmt: skip
        return cls(q * sharpness, keys, values)

    @property
    def length(self) -> int:
        """Tokens of context, the new one not among them."""
        return len(self.keys) - 1

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def attention(self, heads: slice = slice(None), tokens: slice = slice(None)) -> AttentionState:
        """Some heads of the new token over some tokens, on one rank in one piece: out [1, heads, D], lse [1, heads]."""
        q, keys, values = self.q[:, heads].transpose(0, 1), self.keys[tokens], self.values[tokens]
        state = attend(q, keys.transpose(0, 1), values.transpose(0, 1), self.scale)
        return AttentionState(state.out.transpose(0, 1), state.lse.transpose(0, 1))

    def caches(self, shard: ContextShard, table: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's paged keys and values, [blocks, B, 1, D], written through its slots; NaN where nothing is."""
        slots = torch.from_numpy(shard.slot_mapping(np.arange(self.length), table, BLOCK_SIZE))
        mine = slots >= 0
        caches = [torch.full((int(table.max(initial=0)) + 1, BLOCK_SIZE, 1, self.q.shape[-1]), math.nan)
                  for _ in range(2)]  # fmt: skip
        for cache, x in zip(caches, (self.keys, self.values), strict=True):
            cache.flatten(0, 1)[slots[mine]] = x[: self.length][mine]
        return caches[0], caches[1]

    def parts(self, size: int, interleave: int = 1) -> list[AttentionState]:
        """What each rank makes of its own tokens for all heads, before anything is exchanged."""
        found = []
        for rank in range(size):
            shard = ContextShard(rank, size, interleave)
            table = block_table(shard, self.length)
            k_cache, v_cache = self.caches(shard, table)
            found.append(context_attention(self.q, k_cache, v_cache, torch.from_numpy(table)[None], [1], [self.length],
                                           shard, self.scale))  # fmt: skip
        return found


def block_table(shard: ContextShard, length: int) -> np.ndarray:
    """The same on every rank, [W] int32: blocks in falling order, so that no position is its own slot."""
    return np.arange(shard.blocks_for(length, BLOCK_SIZE), 0, -1, dtype=np.int32)


def decode(
    step: DecodeStep, size: int, comm_backend: CommBackend = "ag_rs", q_replicate: bool = False, interleave: int = 1
) -> tuple[AttentionState, list[LocalGroup]]:
    """The step on `size` ranks, heads put together in order, and the groups with what they received."""
    own = step.q.shape[1] // size

    def work(group: Group) -> AttentionState:
        heads = slice(group.rank * own, (group.rank + 1) * own)
        shard = ContextShard(group.rank, size, interleave)
        table = block_table(shard, step.length)
        k_cache, v_cache = step.caches(shard, table)
        new = step.attention(heads, slice(step.length, None))
        return context_parallel_attention(
            step.q if q_replicate else step.q[:, heads], new, k_cache, v_cache, torch.from_numpy(table)[None], [1],
            [step.length], shard, step.scale, group, comm_backend, q_replicate,
        )  # fmt: skip

    groups = LocalGroup.create(size)
    states = run_ranks(groups, work)
    whole = AttentionState(torch.cat([s.out for s in states], 1), torch.cat([s.lse for s in states], 1))
    return whole, groups
