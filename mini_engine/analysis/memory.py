"""What stays in memory: weights once, KV for every token of every request (book 8.1.2).

Every `NumberFormat` argument may be left out: None is the model's own dtype.
"""

from __future__ import annotations

from mini_engine.analysis.formats import NumberFormat, get_format
from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.config import ModelConfig


def native_format(model: ModelConfig) -> NumberFormat:
    """The format of the model's own dtype."""
    return get_format(model.dtype)


def weight_bytes(model: ModelConfig, weights: NumberFormat | None = None) -> int:
    """Bytes of all resident weights, M_w of book 8.1.2.

    Assumes that every tensor is stored in the one format; real quantised files keep norms and some matrices wider.
    """
    return (weights or native_format(model)).bytes_for(model.num_params)


def weight_read_bytes(model: ModelConfig, weights: NumberFormat | None = None) -> int:
    """Bytes of weights that one round reads, D_w of book 8.2.1.

    Everything but the input embedding, of which a round looks up single rows; a tied embedding is read in full as the
    output matrix. Each matrix is read once a round, however many rows use it.
    """
    return (weights or native_format(model)).bytes_for(model.num_params_read)


def kv_bytes_per_token(model: ModelConfig, kv: NumberFormat | None = None) -> int:
    """Bytes that one token leaves in the KV cache of all layers, k of book 8.1.2: 2 · layers · KV heads · head_dim; of
    latent attention layers · (kv_lora_rank + rope).

    Raises AnalysisError where the format's groups do not divide a head: GGML refuses such a cache as well.
    """
    kv = kv or native_format(model)
    if model.cached_key_dim % kv.group:
        raise AnalysisError(
            f"{kv.name} stores groups of {kv.group} values, which do not divide a head of {model.cached_key_dim}; "
            f"use an ungrouped format"
        )
    values = model.cached_heads * model.cached_value_dim  # none of their own in latent attention
    return model.num_hidden_layers * (kv.bytes_for(model.kv_size) + kv.bytes_for(values))


def kv_bytes(model: ModelConfig, tokens: int, kv: NumberFormat | None = None) -> int:
    """Bytes of KV of that many tokens, with no rounding to blocks."""
    whole(0, tokens=tokens)
    return tokens * kv_bytes_per_token(model, kv)


def ffn_bytes_per_layer(model: ModelConfig, weights: NumberFormat | None = None) -> int:
    """Bytes of the gate, up and down matrices of one layer (book 8.2.3)."""
    return (weights or native_format(model)).bytes_for(3 * model.hidden_size * model.intermediate_size)


def resident_bytes(
    model: ModelConfig,
    requests: int,
    tokens: int,
    weights: NumberFormat | None = None,
    kv: NumberFormat | None = None,
) -> int:
    """Weights and the KV of `requests` unshared contexts of `tokens` each.

    Source: book 8.2.1, 64 requests of 2048 + 1 tokens in 35.7 GB. Said there only in passing: that is 33.3 GiB, more
    than the chapter's instance of 32 GiB has in all. The batch sweep of experiment 8-1 ran with 24 GiB of KV instead.
    """
    whole(0, requests=requests)
    return weight_bytes(model, weights) + requests * kv_bytes(model, tokens, kv)
