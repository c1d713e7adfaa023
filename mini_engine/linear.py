"""A matrix product by a weight: dense, or by 4-bit weights as a GGUF file holds them.

With one row a product takes as long as its weights take to read, so a quarter of the bytes is worth more than exact
arithmetic. With many rows the multiplications decide, and a CPU's are fastest in float32. So on a CPU `Int4Linear`
keeps both forms and chooses by the number of rows.

Measured, the four matrices of a SmolLM2 layer on two cores with AVX-512 and bfloat16 instructions, on a noisy machine:
4-bit 0.25 ms against float32 0.41 ms at one row, 1.6 against 1.8 to 2.0 at 16, level at 32. The operator is fast for
bfloat16 activations only: with float32 ones it took 12 to 50 times as long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mini_engine.checkpoint import Checkpoint

MAX_INT4_ROWS = 16
GROUP = 32
INT4_ROWS = 16  # the operator takes weights with multiples of so many rows


class Int4Groups(NamedTuple):
    """A weight [N, K] as `scale * q + minimum` in groups of 32 along K: Q4_1, or Q4_0 with minimum -8 scale.

    q [N, K] uint8 below 16; scale, minimum [N, K / 32] float32.
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor


class Linear:
    """x @ weight.T with weight [out, in] and x [T, in]."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        self._transposed = weight.t()  # made once: F.linear would make it at each call

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._transposed)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the dtype it comes in: bfloat16 of 4-bit weights. Who can use that is spared a conversion."""
        return self(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the product, in as few operators as it takes, in residual's dtype. x: any dtype."""
        return torch.addmm(residual, x.to(residual.dtype), self._transposed)

    @property
    def out_features(self) -> int:
        return len(self.weight)

    def tensors(self) -> list[torch.Tensor]:
        """All weights held."""
        return [self.weight]

    def read_bytes(self) -> int:
        """Bytes of weights read to multiply a single row."""
        return self.weight.nbytes


class Int4Linear(Linear):
    """The same product from 4-bit groups when there are few rows; activations and scales are rounded to bfloat16.

    torch's operator computes (q - 8) * scale + zero, so a group's minimum m becomes zero = m + 8 * scale.
    """

    def __init__(self, weight: torch.Tensor, groups: Int4Groups):
        super().__init__(weight)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.q.int(), 1)
        zero = groups.minimum + 8 * groups.scale
        self.scale_and_zero = torch.stack((groups.scale, zero), -1).transpose(0, 1).contiguous().bfloat16()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MAX_INT4_ROWS:
            return super().__call__(x)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.packed, GROUP, self.scale_and_zero)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MAX_INT4_ROWS:
            return super().add_to(residual, x)
        return residual + self.product(x)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.packed, self.scale_and_zero]

    def read_bytes(self) -> int:
        return self.packed.nbytes + self.scale_and_zero.nbytes


class HalfLinear(Linear):
    """The same product by a bfloat16 copy when there are few rows: for the vocabulary, which is not kept in 4 bits."""

    def __init__(self, weight: torch.Tensor):
        super().__init__(weight)
        self.half = weight.bfloat16()
        self._half_transposed = self.half.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > MAX_INT4_ROWS:
            return super().__call__(x)
        return torch.mm(x.bfloat16(), self._half_transposed).to(x.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.half]

    def read_bytes(self) -> int:
        return self.half.nbytes


def int4_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that a model holds beside its dense weights when it uses the file's 4-bit weights: those, and the
    vocabulary's bfloat16 copy."""
    elements = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names() if checkpoint.holds_int4(name))
    if not elements:
        return 0
    return elements // 2 + 4 * (elements // GROUP) + 2 * checkpoint.config.embedding_params
