"""Reads a checkpoint's tensors straight to where they stay: no second copy of the model exists at any time."""

from __future__ import annotations

import torch

from mini_engine.checkpoint import Checkpoint
from mini_engine.linear import INT4_ROWS, Int4Groups, Int4Linear, Linear, many_rows_dtype


class WeightLoader:
    """int4: use the file's 4-bit weights as they are where it has them; has_int4 says whether any were."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, int4: bool = False):
        self.checkpoint, self.dtype, self.device, self.int4 = checkpoint, dtype, device, int4
        self.has_int4 = False

    def __call__(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor, or several stacked by rows. dtype: another than the model's."""
        rows = [self.checkpoint.shape(name)[0] for name in names]
        shape = (sum(rows), *self.checkpoint.shape(names[0])[1:])
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        for name, part in zip(names, out.split(rows), strict=True):
            self.checkpoint.read(name, part)
        return out

    def linear(self, *names: str) -> Linear:
        """A matrix, or several stacked by rows; in 4 bits as well if all of them are."""
        num_rows = sum(self.checkpoint.shape(name)[0] for name in names)
        if not self.int4 or not all(map(self.checkpoint.holds_int4, names)) or num_rows % INT4_ROWS:
            return Linear(self(*names))
        self.has_int4 = True
        weight = self(*names, dtype=many_rows_dtype())
        groups = [self.checkpoint.read_int4(name) for name in names]
        return Int4Linear(weight, Int4Groups(*(torch.cat(parts) for parts in zip(*groups, strict=True))))
