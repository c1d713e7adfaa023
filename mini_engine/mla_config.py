"""The two shapes that DeepSeek-V2 adds to a decoder: multi-head latent attention, and a mixture of experts.

    MLA   a token leaves one latent of kv_lora_rank elements and one rotated key of qk_rope_head_dim, for all heads
    MoE   from layer first_k_dense_replace on, a router picks num_experts_per_tok of n_routed_experts small MLPs

Never imports torch. Names are those of Hugging Face's config.json. Source: DeepSeek-V2 (DeepSeek-AI 2024, 2.1 and 2.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mini_engine.errors import ModelLoadError

TOPK_METHODS = ("greedy", "group_limited_greedy")
# Settings that change the result, and the only values at which this engine computes it. ep_size and moe_layer_freq
# are read by DeepSeek's own code; transformers leaves them, and scoring_func, unread.
_ONLY: dict[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "moe_layer_freq": (None, 1),
    "ep_size": (None, 1),
}


@dataclass(frozen=True)
class MLAShape:
    """Widths in elements. A query or key head is qk_nope_head_dim unrotated and qk_rope_head_dim rotated elements.

    q_lora_rank: width of the queries' own latent; None where they are projected from the hidden state at once.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _positive(self, *(name for name, value in vars(self).items() if name != "q_lora_rank" or value is not None))
        if self.qk_rope_head_dim % 2:
            raise ModelLoadError(
                f"model config: rotary embedding needs an even qk_rope_head_dim, got {self.qk_rope_head_dim}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head, and of a key head in the naive form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Elements that a token leaves in a layer: its latent, then its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def naive_dim(self) -> int:
        """Elements that the naive form holds of a token and head for the time of a layer: what the latent is projected
        to, the key put together from it, the value filled up to the key's width."""
        return self.qk_nope_head_dim + self.v_head_dim + self.qk_head_dim + max(self.qk_head_dim, self.v_head_dim)

    @property
    def naive_break_even(self) -> float:
        """How many new tokens of a sequence cost as much in either form; with more, naive takes fewer operations.

        A pair of a query and a key takes 2 heads (2 r + rope) operations absorbed and 2 heads (nope + rope + v) naive,
        which projects each key once, by 2 heads r (nope + v): alike when new tokens (2 r - nope - v) = r (nope + v).
        Infinite where the latent is so narrow that absorbed is never the dearer one.
        """
        up = self.qk_nope_head_dim + self.v_head_dim
        saved = 2 * self.kv_lora_rank - up
        return self.kv_lora_rank * up / saved if saved > 0 else math.inf

    def num_params(self, hidden: int, heads: int) -> int:
        """Parameters of the attention of one layer, its two inner norms among them."""
        queries = heads * self.qk_head_dim
        q = hidden * queries if self.q_lora_rank is None else self.q_lora_rank * (hidden + 1 + queries)
        kv = hidden * self.cached_dim + self.kv_lora_rank * (1 + heads * (self.qk_nope_head_dim + self.v_head_dim))
        return q + kv + heads * self.v_head_dim * hidden

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MLAShape:
        """Raises KeyError for what config.json lacks; q_lora_rank must be there, if only as null."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True)
class MoEShape:
    """Which layers have experts, how many and how wide, and how a token's are picked.

    The n_shared_experts every token goes through are one MLP of n_shared_experts · moe_intermediate_size.
    topk_method: "group_limited_greedy" picks within the topk_group best of n_group groups of experts.
    norm_topk_prob: the picked scores are made to sum to 1, and routed_scaling_factor is not applied; this is the rule
        of DeepSeek's own code, which transformers leaves out. Published V2 checkpoints set it to false.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
        _positive(self, *names)
        for name in ("n_shared_experts", "first_k_dense_replace"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ModelLoadError(f"model config: {name} must be a whole number, got {getattr(self, name)!r}")
        if self.topk_method not in TOPK_METHODS:
            raise ModelLoadError(
                f"topk_method {self.topk_method!r} is not supported, only {' and '.join(TOPK_METHODS)}"
            )
        limited = self.topk_method == "group_limited_greedy"
        if limited and (self.n_routed_experts % self.n_group or self.topk_group > self.n_group):
            raise ModelLoadError(
                f"model config: {self.n_routed_experts} experts in n_group {self.n_group} groups of which topk_group "
                f"{self.topk_group} may be used: the groups must be equal, and at least as many as are used"
            )
        eligible = self.n_routed_experts // self.n_group * self.topk_group if limited else self.n_routed_experts
        if self.num_experts_per_tok > eligible:
            raise ModelLoadError(
                f"model config: num_experts_per_tok {self.num_experts_per_tok} is more than the {eligible} experts "
                f"that a token may be sent to"
            )

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts together; 0 where there are none."""
        return self.n_shared_experts * self.moe_intermediate_size

    def num_params(self, hidden: int) -> int:
        """Parameters of the router and all experts of one layer."""
        return self._num_params(hidden, self.n_routed_experts)

    def num_params_read(self, hidden: int) -> int:
        """Those that one token reads: the router, its own experts, the shared ones."""
        return self._num_params(hidden, self.num_experts_per_tok)

    def _num_params(self, hidden: int, experts: int) -> int:
        router = self.n_routed_experts * hidden
        return router + 3 * hidden * (experts * self.moe_intermediate_size + self.shared_intermediate_size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MoEShape | None:
        """None for a model without experts. Raises KeyError for what config.json lacks."""
        if config.get("n_routed_experts") is None:
            return None
        for name, values in _ONLY.items():
            if config.get(name) not in values:
                raise ModelLoadError(f"config.json sets {name} to {config[name]!r}, only {values[1]!r} is supported")
        required = {name: config[name] for name in ("num_experts_per_tok", "moe_intermediate_size")}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: config[name] for name in names if config.get(name) is not None} | required)


def _positive(shape: MLAShape | MoEShape, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelLoadError(f"model config: {name} must be a positive integer, got {value!r}")
