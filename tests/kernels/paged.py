"""A ragged batch over a hostile pool: block ids shuffled, every slot that holds no token NaN."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from mini_engine.attention import AttentionState, paged_attention_reference
from mini_engine.batch import Batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SPARE_BLOCKS = 4


@dataclass(frozen=True)
class Paged:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: Batch
    scale: float

    @property
    def reference(self) -> AttentionState:
        return paged_attention_reference(self.q, self.k_cache, self.v_cache, self.batch, self.scale)

    def slice(self, row: int) -> Paged:
        """The same with only one of the sequences."""
        start = sum(self.batch.query_lens[:row])
        lens, contexts = self.batch.query_lens[row : row + 1], self.batch.context_lens[row : row + 1]
        batch = make_batch(lens, contexts, self.batch.block_table[row : row + 1])
        return Paged(self.q[start : start + lens[0]], self.k_cache, self.v_cache, batch, self.scale)


def make_batch(query_lens: tuple[int, ...], context_lens: tuple[int, ...], block_table: torch.Tensor) -> Batch:
    device = block_table.device
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    seq_lens = [new + context for new, context in zip(query_lens, context_lens, strict=True)]
    return Batch(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=block_table,
        logits_indices=nothing,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        num_decodes=0,
        query_lens=query_lens,
        context_lens=context_lens,
    )


def make_paged(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    device: torch.device,
    *,
    group: int = 4,
    kv_heads: int = 1,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    """Random tokens; q is a view into a QKV product, as in the model."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [new + context for new, context in zip(query_lens, context_lens, strict=True)]
    blocks = [-(-length // block_size) for length in seq_lens]
    num_blocks = 1 + sum(blocks) + SPARE_BLOCKS
    ids = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    shape = (num_blocks, block_size, kv_heads, dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
    block_table = torch.zeros(len(seq_lens), max(1, *blocks), dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        for i in range(blocks[row]):
            block_table[row, i] = block = next(ids)
            filled = min(block_size, length - i * block_size)
            for cache in caches:
                cache[block, :filled] = torch.randn(filled, kv_heads, dim, generator=generator).to(dtype)
    heads = group * kv_heads
    qkv = torch.randn(sum(query_lens), heads + 2 * kv_heads, dim, generator=generator).to(dtype).to(device)
    batch = make_batch(query_lens, context_lens, block_table.to(device))
    return Paged(qkv[:, :heads], caches[0].to(device), caches[1].to(device), batch, dim**-0.5)
