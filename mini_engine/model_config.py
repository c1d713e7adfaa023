"""What a model is: a frozen dataclass under the names of Hugging Face's config.json, checked once.

Never imports torch: the arithmetic and the simulator use it without paying for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mini_engine.errors import ConfigError, ModelLoadError
from mini_engine.mla_config import MLAShape, MoEShape
from mini_engine.rope_scaling import Llama3RopeScaling, RopeScaling, YarnRopeScaling, read_rope

__all__ = [
    "DTYPE_BYTES",
    "Llama3RopeScaling",
    "MLAShape",
    "MoEShape",
    "ModelConfig",
    "YarnRopeScaling",
    "dtype_bytes",
]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "DeepseekV2ForCausalLM": "deepseek_v2"}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder, under the names of Hugging Face's config.json.

    Counts are elements; the methods that return bytes say so. `num_attention_heads // num_key_value_heads` query
    heads read each KV head (grouped-query attention).
    mla: of latent attention; then there is one KV head, the latent that all query heads read, and head_dim is the
        width of a query head. moe: of a mixture of experts; intermediate_size is that of the layers without.
    rope_factors: what a GGUF file has in place of `rope_scaling`: each of the head_dim / 2 inverse frequencies is
        divided by its own factor.
    """

    architecture: Literal["llama", "qwen3", "deepseek_v2"]
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    mla: MLAShape | None = None
    moe: MoEShape | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES.values():
            raise ModelLoadError(
                f"architecture {self.architecture!r} is not supported, only {', '.join(ARCHITECTURES.values())}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value <= 0):
                raise ModelLoadError(f"model config: {field.name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelLoadError(
                f"model config: {self.num_attention_heads} query heads cannot be shared out evenly over "
                f"{self.num_key_value_heads} KV heads"
            )
        if self.rotary_dim % 2:
            raise ModelLoadError(f"model config: rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.rope_factors is not None:
            self._check_rope_factors(self.rope_factors)
        self._check_latent_attention()

    def _check_latent_attention(self) -> None:
        if (self.architecture == "deepseek_v2") != (self.mla is not None) or (self.moe and not self.mla):
            raise ModelLoadError(
                f"model config: a deepseek_v2 needs mla, and only it takes mla and moe; got a {self.architecture} with "
                f"mla {self.mla} and moe {self.moe}"
            )
        if self.mla and (self.num_key_value_heads, self.head_dim) != (1, self.mla.qk_head_dim):
            raise ModelLoadError(
                f"model config: latent attention has 1 KV head and head_dim {self.mla.qk_head_dim} (nope and rope), "
                f"got {self.num_key_value_heads} and {self.head_dim}"
            )

    def _check_rope_factors(self, factors: tuple[float, ...]) -> None:
        if self.rope_scaling is not None:
            raise ModelLoadError("model config: rope_scaling and rope_factors exclude each other")
        if len(factors) != self.head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
            raise ModelLoadError(
                f"model config: rope_factors must be {self.head_dim // 2} positive numbers, half of head_dim "
                f"{self.head_dim}, got {len(factors)} from {min(factors, default=0)} to {max(factors, default=0)}"
            )

    @property
    def qk_norm(self) -> bool:
        """Whether query and key heads are RMS-normalised before the rotation (Qwen3)."""
        return self.architecture == "qwen3"

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all cached key heads (or all value heads) together."""
        return self.cached_heads * self.cached_key_dim

    @property
    def o_size(self) -> int:
        """Width of what all heads return together."""
        return self.num_attention_heads * (self.mla.v_head_dim if self.mla else self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def cached_heads(self) -> int:
        """KV heads in the cache."""
        return self.num_key_value_heads

    @property
    def cached_key_dim(self) -> int:
        """Elements of K that a token leaves in each KV head of the cache."""
        return self.mla.cached_dim if self.mla else self.head_dim

    @property
    def cached_value_dim(self) -> int:
        """Elements of V beside K in the cache: 0 where the values are the first `cached_value_view` elements of K."""
        return 0 if self.mla else self.head_dim

    @property
    def cached_value_view(self) -> int:
        """How many first elements of a cached key are its value: kv_lora_rank; 0 where V has a cache of its own."""
        return self.mla.kv_lora_rank if self.mla else 0

    @property
    def num_moe_layers(self) -> int:
        return max(0, self.num_hidden_layers - self.moe.first_k_dense_replace) if self.moe else 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_k_dense_replace

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        """Parameters of a layer; where some have experts, of one without."""
        return self._around_mlp_params + 3 * self.hidden_size * self.intermediate_size

    @property
    def _around_mlp_params(self) -> int:
        """A layer but its MLP or experts."""
        if self.mla:
            return self.mla.num_params(self.hidden_size, self.num_attention_heads) + 2 * self.hidden_size
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def num_params(self) -> int:
        """All parameters; tied embeddings are one matrix and count once."""
        experts = self.moe.num_params(self.hidden_size) if self.moe else 0
        embeddings = self.embedding_params * (1 if self.tie_word_embeddings else 2)
        return self._params_of_layers(experts) + embeddings + self.hidden_size

    @property
    def num_params_read(self) -> int:
        """Parameters one decode round reads: all but the input embedding, of which it looks up single rows (8.2.1).

        With experts, those that a round of one sequence reads: a larger batch reads the union of its tokens' experts.
        """
        experts = self.moe.num_params_read(self.hidden_size) if self.moe else 0
        return self._params_of_layers(experts) + self.embedding_params + self.hidden_size

    def _params_of_layers(self, experts: int) -> int:
        """experts: parameters of a MoE layer's router and experts."""
        num_dense = self.num_hidden_layers - self.num_moe_layers
        return num_dense * self.layer_params + self.num_moe_layers * (self._around_mlp_params + experts)

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all weights held in `dtype` (default: the model's own)."""
        return self.num_params * dtype_bytes(dtype or self.dtype)

    def weight_read_bytes(self, dtype: str | None = None) -> int:
        """Bytes of weights one decode round reads, D_w of book 8.2.1."""
        return self.num_params_read * dtype_bytes(dtype or self.dtype)

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes that one token leaves in all layers: layers · KV heads · (width of K + width of V) · bytes (8.1.2)."""
        values = self.num_hidden_layers * self.cached_heads * (self.cached_key_dim + self.cached_value_dim)
        return values * dtype_bytes(dtype or self.dtype)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json, in the form of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).

        Raises ModelLoadError for an architecture or setting this engine would otherwise silently ignore.
        """
        names = config.get("architectures") or [config.get("model_type", "?")]
        architecture = ARCHITECTURES.get(names[0])
        if architecture is None:
            raise ModelLoadError(
                f"architecture {names[0]} is not supported: this engine runs {' and '.join(ARCHITECTURES)}"
            )
        _refuse_ignored_settings(config)
        try:
            heads = config["num_attention_heads"]
            latent = architecture == "deepseek_v2"
            mla = MLAShape.from_hf(config) if latent else None
            theta, scaling = read_rope(config, "yarn" if latent else "llama3")
            return cls(
                architecture=architecture,  # type: ignore[arg-type]
                num_hidden_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                num_attention_heads=heads,
                num_key_value_heads=1 if mla else config.get("num_key_value_heads") or heads,
                head_dim=mla.qk_head_dim if mla else config.get("head_dim") or _head_dim(config),
                intermediate_size=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                tie_word_embeddings=config.get("tie_word_embeddings", False),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=config.get("max_position_embeddings", 2048),
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
                mla=mla,
                moe=MoEShape.from_hf(config) if latent else None,
            )
        except KeyError as error:
            raise ModelLoadError(f"config.json lacks {error.args[0]!r}, which a {architecture} model needs") from None
        except (TypeError, AttributeError) as error:
            raise ModelLoadError(f"config.json has a value of the wrong kind: {error}") from None


def _head_dim(config: Mapping[str, Any]) -> int:
    """Where config.json does not say; a number of heads of 0 is refused by name later."""
    return config["hidden_size"] // (config["num_attention_heads"] or 1)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ConfigError for a name that is not one of DTYPE_BYTES."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _refuse_ignored_settings(config: Mapping[str, Any]) -> None:
    """Settings that change the result and that this engine does not compute."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(name):
            raise ModelLoadError(f"config.json sets {name}, which this engine does not compute")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ModelLoadError("config.json asks for sliding-window layers, which this engine does not compute")
    if config.get("pretraining_tp", 1) != 1:
        raise ModelLoadError("config.json sets pretraining_tp, which this engine does not compute")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise ModelLoadError(
            f"safetensors quantised by {method!r} are not supported: use unquantised weights or a GGUF file"
        )
