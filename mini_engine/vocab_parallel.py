"""The embedding, cut by rows of the vocabulary over a tensor-parallel group.

    rank 0 holds tokens 0..V/T-1, rank 1 the next V/T, ...     each looks up what it holds, zeros elsewhere; then a sum

The head is cut alike: each rank's logits are a run of columns, gathered by the runner.
Source: Megatron-LM (Shoeybi et al. 2019).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mini_engine.groups import Group


class VocabParallelEmbedding:
    """weight: this rank's rows [ceil(V / T), hidden]; all of them in a group of one."""

    def __init__(self, weight: torch.Tensor, group: Group):
        self.weight, self.group = weight, group

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of tokens [T], on every rank alike."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = len(self.weight)
        local = input_ids - self.group.rank * rows
        held = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return self.group.all_reduce(found.masked_fill(~held[:, None], 0.0))
