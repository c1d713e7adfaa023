"""Bytes a decode round reads, and what they come to for each output token (book 8.2.1).

    D(b, L) = D_w + b·L·k          d(b, L) = D_w / b + L·k

A batch reads the weights once, and every request's own context. Assumes contexts of equal length that share no KV, a
cache that is read once a round, and counts neither activations nor what the round writes.
"""

from __future__ import annotations

from mini_engine.analysis.formats import NumberFormat
from mini_engine.analysis.inputs import whole
from mini_engine.analysis.memory import kv_bytes, weight_read_bytes
from mini_engine.config import ModelConfig


def round_read_bytes(
    model: ModelConfig,
    batch: int,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> int:
    """Bytes read by one decode round of `batch` requests with `context` cached tokens each: D(b, L)."""
    whole(1, batch=batch)
    return weight_read_bytes(model, weights) + batch * kv_bytes(model, context, kv)


def weight_read_share(model: ModelConfig, batch: int, weights: NumberFormat | None = None) -> float:
    """Bytes of weights read for each output token: D_w / b. Doubling the batch halves it."""
    whole(1, batch=batch)
    return weight_read_bytes(model, weights) / batch


def read_bytes_per_token(
    model: ModelConfig,
    batch: int,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> float:
    """Bytes read for each output token: d(b, L). Its floor, however large the batch, is the KV of one context."""
    return weight_read_share(model, batch, weights) + kv_bytes(model, context, kv)


def crossover_batch(
    model: ModelConfig, context: int, weights: NumberFormat | None = None, kv: NumberFormat | None = None
) -> int:
    """Smallest batch whose KV reads reach the shared weight reads in one decode round.

    context: tokens already in each request's cache, not shared between requests.
    Source: book 8.2.1, b_KV = ceil(D_w / (L k)). Whether so many requests fit is another question: `max_requests`.
    """
    whole(1, context=context)
    return -(-weight_read_bytes(model, weights) // kv_bytes(model, context, kv))


def separate_store_read_bytes_per_token(model: ModelConfig, context: int, kv: NumberFormat | None = None) -> int:
    """Bytes read from the card's memory for each output token when weights come from a fast store of their own.

    Source: book 8.2.1 (a ROM beside the accelerator): W/B + K becomes K, whatever the batch. Assumes the store is fast
    enough never to be waited for; `decode_step` takes its bandwidth where that is in doubt.
    """
    return kv_bytes(model, context, kv)


def separate_store_gain(
    model: ModelConfig,
    batch: int,
    context: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> float:
    """How many times fewer bytes a separate store leaves to read: (W/B + K) / K. Tends to 1 as the batch grows."""
    whole(1, context=context)
    return read_bytes_per_token(model, batch, context, weights, kv) / kv_bytes(model, context, kv)
