"""The Triton backend of latent attention (MLA): `TritonAttention` over a cache whose values are part of its keys.

Neighbours of one kind share a launch, as there. A sequence's kind is the tile that its new tokens and the heads ask
for, so its result never depends on its batch-mates.
"""

from __future__ import annotations

import torch

from mini_engine.attention import AttentionState
from mini_engine.batch import Batch
from mini_engine.kernels.checks import KernelInputError
from mini_engine.kernels.paged_mla import mla_tile_config, paged_mla
from mini_engine.triton_attention import Run, split_runs


class TritonMLAAttention:
    """Paged latent attention of one batch. out_dtype: float32, or the model's own to save a conversion."""

    def __init__(self, batch: Batch, scale: float, out_dtype: torch.dtype = torch.float32):
        self.batch, self.scale, self.out_dtype = batch, scale, out_dtype
        self._runs: dict[tuple[int, int], list[Run]] = {}  # by heads and bytes of an element: known at the first layer

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> AttentionState:
        """q [T, heads, R + P], k_cache [num_blocks, block_size, 1, R + P] of one layer, v_cache its first R elements.

        Gives out [T, heads, R]. The new tokens' latents are already in the cache. Raises KernelInputError where v_cache
        lies elsewhere.
        """
        rank = v_cache.shape[-1]
        if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
            raise KernelInputError(
                f"v_cache must be k_cache[..., :{rank}], it is a tensor of its own: use TritonAttention"
            )
        batch = self.batch
        out = torch.empty((*q.shape[:2], rank), dtype=self.out_dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for run in self.runs(q.shape[1], k_cache.itemsize):
            paged_mla(
                q[run.tokens],
                k_cache,
                rank,
                batch.query_start_loc[run.seqs.start : run.seqs.stop + 1],
                batch.seq_lens[run.seqs],
                batch.block_table[run.seqs],
                self.scale,
                run.max_query_len,
                run.max_seq_len,
                out=out[run.tokens],
                lse=lse[run.tokens],
            )
        return AttentionState(out, lse)

    def runs(self, heads: int, itemsize: int) -> list[Run]:
        """The launches of a layer."""
        key = heads, itemsize
        if key not in self._runs:
            lens = self.batch.query_lens, self.batch.context_lens
            self._runs[key] = split_runs(*lens, kind=lambda length: mla_tile_config(length, heads, itemsize))
        return self._runs[key]
