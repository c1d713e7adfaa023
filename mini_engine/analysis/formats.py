"""How many bytes a number takes, in each format that weights or KV are stored in.

A grouped format keeps a scale for every few values; its bytes are part of the price, so 8-bit codes cost 8.5 bits.
This is the arithmetic only: packing and unpacking belong to the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mini_engine.analysis.inputs import AnalysisError, whole


@dataclass(frozen=True)
class NumberFormat:
    """`group` values are stored together in `group_bytes` bytes, scales included."""

    name: str
    group: int
    group_bytes: int
    source: str

    def __post_init__(self) -> None:
        whole(1, group=self.group, group_bytes=self.group_bytes)

    @property
    def bits_per_value(self) -> float:
        """Bits of one value, its share of the group's scale included."""
        return 8 * self.group_bytes / self.group

    def bytes_for(self, values: int) -> int:
        """Bytes of `values` numbers; the last group is stored whole."""
        whole(0, values=values)
        return math.ceil(values / self.group) * self.group_bytes


FP32 = NumberFormat("float32", 1, 4, "IEEE 754")
FP16 = NumberFormat("float16", 1, 2, "IEEE 754")
BF16 = NumberFormat("bfloat16", 1, 2, "upper half of IEEE 754 binary32")
# vLLM keeps one scale per tensor or per head beside an FP8 cache: a few bytes in all, not counted.
FP8 = NumberFormat("fp8", 1, 1, "OCP 8-bit floating point specification (OFP8), e4m3 and e5m2")
Q8_0 = NumberFormat("q8_0", 32, 34, "GGML block_q8_0: one float16 scale, 32 codes of 8 bits")
Q4_0 = NumberFormat("q4_0", 32, 18, "GGML block_q4_0: one float16 scale, 32 codes of 4 bits")
Q4_1 = NumberFormat("q4_1", 32, 20, "GGML block_q4_1: float16 scale and minimum, 32 codes of 4 bits")

FORMATS = (FP32, FP16, BF16, FP8, Q8_0, Q4_0, Q4_1)


def get_format(name: str) -> NumberFormat:
    """The format of that name. Raises AnalysisError with the known names."""
    for number_format in FORMATS:
        if number_format.name == name:
            return number_format
    raise AnalysisError(f"number format {name!r} is not one of {', '.join(known.name for known in FORMATS)}")
