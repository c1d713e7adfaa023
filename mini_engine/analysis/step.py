"""Least time of a round: compute or reading, whichever is longer (book 8.2.1).

    T = max(b·F / P, (D_w + b·L·k) / β)

Both terms take the card's peaks, so this is a physical bound and no prediction; measured time over it is 1 / MFU or
1 / MBU (`roofline`). For a prediction fitted to measurements see `fitted`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mini_engine.analysis.flops import decode_flops, flops_per_pair, forward_flops
from mini_engine.analysis.formats import NumberFormat
from mini_engine.analysis.hardware import Hardware
from mini_engine.analysis.inputs import AnalysisError, positive, whole
from mini_engine.analysis.memory import kv_bytes, kv_bytes_per_token, weight_read_bytes
from mini_engine.config import ModelConfig


@dataclass(frozen=True)
class StepTime:
    """Seconds that computing and reading need, each alone; they overlap, so the longer one is the round."""

    compute_s: float
    read_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.read_s)

    @property
    def bound(self) -> str:
        """Which of the two binds: "compute" or "memory"."""
        return "compute" if self.compute_s >= self.read_s else "memory"


def decode_step(
    model: ModelConfig,
    hardware: Hardware,
    batch: int,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
    weight_bandwidth: float | None = None,
) -> StepTime:
    """Least time of one decode round of `batch` requests with `context` cached tokens each.

    weight_bandwidth: bytes a second of a separate store that delivers the weights while the card's own memory
        delivers KV (math.inf: never waited for); None reads both from the card's memory.
    """
    whole(1, batch=batch)
    compute = batch * decode_flops(model, context) / hardware.peak(model.dtype)
    weight_reads, kv_reads = weight_read_bytes(model, weights), batch * kv_bytes(model, context, kv)
    if weight_bandwidth is None:
        return StepTime(compute, (weight_reads + kv_reads) / hardware.bandwidth)
    if not weight_bandwidth > 0:
        raise AnalysisError(f"weight_bandwidth must be above 0, got {weight_bandwidth!r}")
    return StepTime(compute, max(weight_reads / weight_bandwidth, kv_reads / hardware.bandwidth))


def prefill_step(
    model: ModelConfig,
    hardware: Hardware,
    new: int,
    history: int = 0,
    batch: int = 1,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> StepTime:
    """Least time of one round that computes `new` tokens after `history` cached ones, for `batch` requests.

    Divide by an MFU to predict: the book does so in three ways that differ, 8K in 376 ms (its fitted step), 428 ms
    (MFU 0.62, measured at 2K) and 459 ms (scheme A of 8.6.3 over 16 requests, MFU 0.578, measured at 8K).
    """
    whole(1, batch=batch, new=new)
    compute = batch * forward_flops(model, new, history) / hardware.peak(model.dtype)
    reads = weight_read_bytes(model, weights) + batch * kv_bytes(model, history, kv)
    return StepTime(compute, reads / hardware.bandwidth)


def compute_bound_batch(
    model: ModelConfig,
    hardware: Hardware,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> int | None:
    """Smallest batch at which a decode round computes for at least as long as it reads; None if there is none.

    Every request adds F/P of computing and L·k/β of reading. Unless the first is larger, no batch ever catches up.
    Source: book 8.2.1, b (F/P − L k/β) = D_w/β.
    """
    compute = Fraction(decode_flops(model, context)) / Fraction(hardware.peak(model.dtype))
    read = Fraction(kv_bytes(model, context, kv)) / Fraction(hardware.bandwidth)
    if compute <= read:
        return None
    return math.ceil(Fraction(weight_read_bytes(model, weights)) / Fraction(hardware.bandwidth) / (compute - read))


def compute_bound_context(model: ModelConfig, hardware: Hardware, kv: NumberFormat | None = None) -> int | None:
    """Longest context at which some batch makes decode compute-bound; None if every context allows it.

    370 tokens for Qwen3-8B on the book's card: past that, a larger batch cannot make decode compute-bound, whatever
    memory there is. The book gives the condition (8.2.1, F/P > L k/β) and no number.
    """
    peak, bandwidth = Fraction(hardware.peak(model.dtype)), Fraction(hardware.bandwidth)
    gain_per_token = kv_bytes_per_token(model, kv) / bandwidth - flops_per_pair(model) / peak
    if gain_per_token <= 0:
        return None
    return math.ceil(decode_flops(model, 0) / peak / gain_per_token) - 1


def seconds_at(bound: StepTime, mfu: float = 1.0, mbu: float = 1.0) -> float:
    """The bound with each term divided by the utilisation measured for it."""
    positive(mfu=mfu, mbu=mbu)
    return max(bound.compute_s / mfu, bound.read_s / mbu)
