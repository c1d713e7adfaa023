"""Attention of public models as context parallelism sees it: what a token caches, what a head sends and gets back.

    GQA   kv_heads heads of keys and of values          a query head is head_dim wide, and so is its result
    MLA   one latent (kv_lora_rank) and one rotary key  absorbed, a query head is latent + rope wide, its result latent

MLA caches one head for all query heads, so `kv_heads` is 1. Source of the shapes: data/attention.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mini_engine.analysis.inputs import whole
from mini_engine.analysis.tables import entry, read_table


@dataclass(frozen=True)
class LatentShape:
    """The ranks and widths of multi-head latent attention, in elements. q_lora_rank 0: queries are not compressed."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope: int
    qk_rope: int
    v_head: int


@dataclass(frozen=True)
class ExpertShape:
    """The FFNs of a mixture of experts: the first `dense_layers` layers have one of width `ffn`, the others experts."""

    dense_layers: int
    ffn: int
    expert_ffn: int
    experts: int
    shared_experts: int
    experts_per_token: int
    vocab: int


@dataclass(frozen=True)
class AttentionShape:
    """Counts are elements. key_dim: width of a query head as it meets the cache; value_dim: of its result.

    cached_values: of one token in one layer. latent: None for GQA. moe: None where the FFNs are not in the table.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    cached_values: int
    latent: LatentShape | None = None
    moe: ExpertShape | None = None
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        whole(1, layers=self.layers, heads=self.heads, kv_heads=self.kv_heads, cached_values=self.cached_values)

    @property
    def query_values(self) -> int:
        """Weights of one layer that make the query heads: what a replicated query projection replicates.

        For MLA also the half of the up-projection that is absorbed into the query.
        """
        if self.latent is None:
            return self.hidden_size * self.heads * self.key_dim
        ranks = self.latent
        width = ranks.q_lora_rank or self.hidden_size
        return self.heads * (width * (ranks.qk_nope + ranks.qk_rope) + ranks.kv_lora_rank * ranks.qk_nope)

    @property
    def attention_values(self) -> int:
        """All attention weights of one layer."""
        if self.latent is None:
            return self.query_values * 2 + 2 * self.hidden_size * self.kv_heads * self.key_dim
        ranks = self.latent
        down = self.hidden_size * (ranks.q_lora_rank + ranks.kv_lora_rank + ranks.qk_rope)
        value_up = self.heads * ranks.kv_lora_rank * ranks.v_head
        return down + self.query_values + value_up + self.heads * ranks.v_head * self.hidden_size


def get_attention(name: str) -> AttentionShape:
    """A model of the table. Raises AnalysisError with the names there are."""
    values = entry(read_table("attention"), name, "attention of model")
    moe = ExpertShape(**values.pop("moe")) if "moe" in values else None
    common: dict[str, Any] = {k: values[k] for k in ("layers", "hidden_size", "heads", "source")}
    if "kv_lora_rank" in values:
        latent = LatentShape(**{k: v for k, v in values.items() if k not in common})
        cached = latent.kv_lora_rank + latent.qk_rope
        return AttentionShape(
            name, kv_heads=1, key_dim=cached, value_dim=latent.kv_lora_rank, cached_values=cached, latent=latent,
            moe=moe, **common,
        )  # fmt: skip
    dim, kv_heads = values["head_dim"], values["kv_heads"]
    return AttentionShape(
        name, kv_heads=kv_heads, key_dim=dim, value_dim=dim, cached_values=2 * kv_heads * dim, moe=moe, **common
    )


def attention_names() -> tuple[str, ...]:
    return tuple(read_table("attention"))
