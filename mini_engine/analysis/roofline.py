"""Arithmetic intensity and the roofline: operations for each byte read, and what a card makes of them.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009); book 8.2.1.
"""

from __future__ import annotations

from mini_engine.analysis.flops import decode_flops
from mini_engine.analysis.formats import BF16, NumberFormat
from mini_engine.analysis.hardware import Hardware
from mini_engine.analysis.inputs import not_negative, positive, whole
from mini_engine.analysis.traffic import round_read_bytes
from mini_engine.config import ModelConfig


def weight_intensity(batch: int, weights: NumberFormat = BF16) -> float:
    """Operations for each byte of weights read: 2b / s_w (book 8.2.1).

    Counts the reading of weights alone, not of activations or KV, so it is what a product Y = XW could reach at best.
    """
    whole(1, batch=batch)
    return 2 * batch / (weights.bits_per_value / 8)


def decode_intensity(
    model: ModelConfig,
    batch: int,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> float:
    """Operations per byte of a whole decode round, KV reads included. It levels off, `weight_intensity` does not."""
    return batch * decode_flops(model, context) / round_read_bytes(model, batch, context, weights, kv)


def ridge_point(hardware: Hardware, dtype: str = "bfloat16") -> float:
    """Operations for each byte at which a card's compute and its memory are both fully used: P / β."""
    return hardware.peak(dtype) / hardware.bandwidth


def attainable_flops(hardware: Hardware, intensity: float, dtype: str = "bfloat16") -> float:
    """Operations a second at that intensity, at most: min(P, intensity · β)."""
    not_negative(intensity=intensity)
    return min(hardware.peak(dtype), intensity * hardware.bandwidth)


def mbu(bytes_read: float, seconds: float, hardware: Hardware) -> float:
    """Memory bandwidth utilisation: least reading time over measured time (book 8.2.1, 1.2.2). A fraction.

    Rising with the batch does not mean that reading got faster: see `marginal_bandwidth`.
    """
    not_negative(bytes_read=bytes_read)
    positive(seconds=seconds)
    return bytes_read / hardware.bandwidth / seconds


def mfu(flops: float, seconds: float, hardware: Hardware, dtype: str = "bfloat16") -> float:
    """Model FLOPs utilisation: least computing time over measured time (book 8.2.1, 1.2.2). A fraction."""
    not_negative(flops=flops)
    positive(seconds=seconds)
    return flops / hardware.peak(dtype) / seconds


def marginal_bandwidth(bytes_read: tuple[float, float], seconds: tuple[float, float]) -> float:
    """Bytes a second at which the *additional* reads of the second of two measured rounds were served.

    A value above the card's bandwidth shows that the first round was not limited by reading: from batch 16 to 64 of
    the book's sweep it is 6.6 TB/s on a card of 1.79, so most of a small batch's round is overhead.
    """
    extra_seconds = seconds[1] - seconds[0]
    positive(extra_seconds=extra_seconds)
    return (bytes_read[1] - bytes_read[0]) / extra_seconds
