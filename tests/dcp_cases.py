"""Attention over a context cut across ranks, beside the whole: made once here, for threads and for processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mini_engine.attention import AttentionState, attend
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import CommBackend, context_parallel_attention
from mini_engine.groups import Group


@dataclass(frozen=True)
class Shape:
    """Query heads, KV heads, and widths of a key and a value. latent: values are the first elements of the keys."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False


TINY = Shape(8, 1, 4, 4)
QWEN3_8B_LIKE = Shape(32, 8, 128, 128)
SMOLLM2_PADDED = Shape(12, 3, 64, 64)  # 9 query heads and 3 of zeros
MLA = Shape(8, 1, 24, 16, latent=True)


@dataclass(frozen=True)
class Case:
    """One step: sequences of `contexts` cached tokens, each with its number of new ones."""

    shape: Shape
    contexts: tuple[int, ...]
    new: tuple[int, ...]
    block_size: int = 4
    sharpness: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float32


class Step:
    """The tensors of a case. Sequence i has keys k[i] [context + new, kv_heads, Dk] and as many values."""

    def __init__(self, case: Case):
        self.case, shape = case, case.shape
        random = torch.Generator().manual_seed(case.seed)

        def draw(length: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=random).to(case.dtype)

        lengths = [context + new for context, new in zip(case.contexts, case.new, strict=True)]
        self.q = draw(sum(case.new), shape.heads, shape.key_dim) * case.sharpness
        if shape is SMOLLM2_PADDED:
            self.q.view(-1, 3, 4, shape.key_dim)[:, :, 3] = 0
        self.k = [draw(length, shape.kv_heads, shape.key_dim) for length in lengths]
        self.v = [
            k[..., : shape.value_dim] if shape.latent else draw(len(k), shape.kv_heads, shape.value_dim) for k in self.k
        ]
        self.scale = 1 / math.sqrt(shape.key_dim)

    def whole(self) -> AttentionState:
        """Causal attention of every new token over all that is before it, on one rank, in float64-free plain torch."""
        return self._causal(self.q, slice(None), first=0)

    def new_tokens(self, heads: slice, kv_heads: slice) -> AttentionState:
        """The new tokens among themselves, for some heads: what a rank computes without the others."""
        return self._causal(self.q[:, heads], kv_heads, first=None)

    def _causal(self, q: torch.Tensor, kv_heads: slice, first: int | None) -> AttentionState:
        outs, lses, row = [], [], 0
        for k, v, context, new in zip(self.k, self.v, self.case.contexts, self.case.new, strict=True):
            start = context if first is None else first
            keys, values = (x[start:, kv_heads].transpose(0, 1) for x in (k, v))
            group = q.shape[1] // keys.shape[0]
            keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
            positions = torch.arange(start, context + new)
            visible = positions[None, :] <= torch.arange(context, context + new)[:, None]
            state = attend(q[row : row + new].transpose(0, 1), keys, values, self.scale, visible)
            outs.append(state.out.transpose(0, 1))
            lses.append(state.lse.transpose(0, 1))
            row += new
        return AttentionState(torch.cat(outs), torch.cat(lses))

    def shard(self, shard: ContextShard, kv_head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One rank's caches, written through its slot mapping, with NaN wherever nothing was written, and the block
        table all ranks share: blocks in no order."""
        size = self.case.block_size
        counts = [shard.blocks_for(len(k), size) for k in self.k]
        ids = np.random.default_rng(1).permutation(sum(counts)) + 1
        table = np.zeros((len(counts), max(counts)), np.int32)
        caches = [
            torch.full((len(ids) + 1, size, 1, x[0].shape[-1]), math.nan, dtype=self.case.dtype)
            for x in (self.k, self.v)
        ]
        first = 0
        for row, count in enumerate(counts):
            table[row, :count] = ids[first : first + count]
            first += count
            slots = torch.from_numpy(shard.slot_mapping(np.arange(len(self.k[row])), table[row], size))
            here = slots >= 0
            for cache, x in zip(caches, (self.k[row], self.v[row]), strict=True):
                cache.flatten(0, 1)[slots[here]] = x[here, kv_head : kv_head + 1]
        return caches[0], caches[1], torch.from_numpy(table)


def run_rank(
    step: Step, group: Group, kv_head: int, interleave: int, comm_backend: CommBackend, q_replicate: bool
) -> AttentionState:
    """What one rank of the context group of `kv_head` computes: its own heads of the step."""
    shape = step.case.shape
    per_kv_head = shape.heads // shape.kv_heads
    own = per_kv_head // group.size
    first = kv_head * per_kv_head + group.rank * own
    heads, kv_heads = slice(first, first + own), slice(kv_head, kv_head + 1)
    shard = ContextShard(group.rank, group.size, interleave)
    k_cache, v_cache, table = step.shard(shard, kv_head)
    group_heads = slice(kv_head * per_kv_head, (kv_head + 1) * per_kv_head)
    return context_parallel_attention(
        step.q[:, group_heads if q_replicate else heads],
        step.new_tokens(heads, kv_heads),
        k_cache,
        v_cache,
        table,
        step.case.new,
        step.case.contexts,
        shard,
        step.scale,
        group,
        comm_backend,
        q_replicate,
    )
