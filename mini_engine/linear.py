"""A matrix product by a weight: dense, or by 4-bit weights as a GGUF file holds them.

With one row a product takes as long as its weights take to read, so a quarter of the bytes is worth more than exact
arithmetic. With many rows the multiplications decide, and which are fastest depends on the CPU: float32, or bfloat16
where it has AMX. So on a CPU `Int4Linear` keeps two forms and chooses by the number of rows.

    ms for all matrices of SmolLM2's layers, two cores     rows   1     4     8    16    32    128    2048
    a CPU with AMX             4-bit                            7.2    11    20    38    71    287    6124
                               bfloat16                          20    18    18    18    24     42     265
                               float32                           23    45    52    59    74    213    2973
    one without                4-bit                            6.4                34                 3400
                               bfloat16, packed by oneDNN        14                35                 2630
                               float32                           19                47                 1407

The 4-bit operator is fast for bfloat16 activations only: with float32 ones it took 12 to 50 times as long.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from mini_engine.checkpoint import Checkpoint

GROUP = 32
AMX_ROWS = 32  # see `_many_rows`
INT4_ROWS = 16  # the operator takes weights with multiples of so many rows


@cache
def has_amx() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX). torch < 2.12 cannot tell."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def max_int4_rows() -> int:
    """The most rows for which 4-bit weights are the fastest; see the table above."""
    return 8 if has_amx() else 16


def many_rows_dtype() -> torch.dtype:
    """What the weights of a 4-bit model are multiplied in when there are more rows."""
    return torch.bfloat16 if has_amx() else torch.float32


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

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the product, in as few operators as it takes, in residual's dtype. x: any dtype."""
        return torch.addmm(residual, x.to(residual.dtype), self._transposed)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x @ weight.T, both in the dtype of what the model computes in."""
        torch.mm(x, self._transposed, out=out)

    def write_sum(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = residual + x @ weight.T."""
        torch.addmm(residual, x, self._transposed, out=out)

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

    weight: for many rows, in float32 or bfloat16; activations are rounded to its dtype.
    torch's operator computes (q - 8) * scale + zero, so a group's minimum m becomes zero = m + 8 * scale.
    """

    def __init__(self, weight: torch.Tensor, groups: Int4Groups):
        super().__init__(weight)
        self.max_rows = max_int4_rows()
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.q.int(), 1)
        zero = groups.minimum + 8 * groups.scale
        self.scale_and_zero = torch.stack((groups.scale, zero), -1).transpose(0, 1).contiguous().bfloat16()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x).to(x.dtype, memory_format=torch.contiguous_format)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self._product(x)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._product(x))

    def write_sum(self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(residual, self._product(x), out=out)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.max_rows:
            return _many_rows(x.to(self.weight.dtype), self.weight)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), self.packed, GROUP, self.scale_and_zero)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.packed, self.scale_and_zero]

    def read_bytes(self) -> int:
        return self.packed.nbytes + self.scale_and_zero.nbytes


class HalfLinear(Linear):
    """The same product by a bfloat16 copy where that is faster: for the vocabulary, which is not kept in 4 bits."""

    def __init__(self, weight: torch.Tensor):
        super().__init__(weight)
        self.half = weight.bfloat16()
        self.max_rows = math.inf if has_amx() else max_int4_rows()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.max_rows:
            return super().__call__(x)
        if len(x) == 1:  # half the time of a matrix product of one row
            return torch.mv(self.half, x[0].bfloat16())[None].to(x.dtype)
        product = _many_rows(x.bfloat16(), self.half)
        return product.to(x.dtype, memory_format=torch.contiguous_format)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.half]

    def read_bytes(self) -> int:
        return self.half.nbytes


def _many_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T of two or more rows. oneDNN's products by AMX copy the matrix on the right into another order first:
    up to AMX_ROWS it is faster to have x there; the result's columns then lie one after the other, not its rows."""
    if weight.dtype == torch.bfloat16 and len(x) <= AMX_ROWS and has_amx():
        return torch.mm(weight, x.t()).t()
    return torch.mm(x, weight.t())


def int4_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the 4-bit weights that a model of this file holds when it uses them."""
    return _int4_elements(checkpoint) * (GROUP // 2 + 4) // GROUP


def extra_bytes(checkpoint: Checkpoint) -> int:
    """Bytes that such a model holds beyond those of float32 weights: the 4-bit weights and the vocabulary's bfloat16
    copy, less what `many_rows_dtype` saves. May be negative."""
    elements = _int4_elements(checkpoint)
    if not elements:
        return 0
    saved = (4 - many_rows_dtype().itemsize) * elements
    return int4_bytes(checkpoint) + 2 * checkpoint.config.embedding_params - saved


def _int4_elements(checkpoint: Checkpoint) -> int:
    in_layers = [name for name in checkpoint.names() if name.startswith("model.layers.")]
    return sum(math.prod(checkpoint.shape(name)) for name in in_layers if checkpoint.holds_int4(name))
