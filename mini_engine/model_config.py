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

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The frequency scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, a ramp between.

    Source: `rope_scaling` of Llama 3.1's config.json, `rope_type: llama3`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ModelLoadError(
                f"rope scaling llama3 needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, got factor "
                f"{self.factor}, low {self.low_freq_factor}, high {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a dense decoder, under the names of Hugging Face's config.json.

    Counts are elements; the methods that return bytes say so. `num_attention_heads // num_key_value_heads` query
    heads read each KV head (grouped-query attention).
    rope_factors: what a GGUF file has in place of `rope_scaling`: each of the head_dim / 2 inverse frequencies is
        divided by its own factor.
    """

    architecture: Literal["llama", "qwen3"]
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    dtype: str = "bfloat16"

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
        if self.head_dim % 2:
            raise ModelLoadError(f"model config: rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.rope_factors is not None:
            self._check_rope_factors(self.rope_factors)

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
        """Width of all key heads (or all value heads) together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def layer_params(self) -> int:
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return attention + mlp + norms

    @property
    def num_params(self) -> int:
        """All parameters; tied embeddings are one matrix and count once."""
        embeddings = self.embedding_params * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * self.layer_params + embeddings + self.hidden_size

    @property
    def num_params_read(self) -> int:
        """Parameters one decode round reads: all but the input embedding, of which it looks up single rows (8.2.1)."""
        return self.num_hidden_layers * self.layer_params + self.embedding_params + self.hidden_size

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of all weights held in `dtype` (default: the model's own)."""
        return self.num_params * dtype_bytes(dtype or self.dtype)

    def weight_read_bytes(self, dtype: str | None = None) -> int:
        """Bytes of weights one decode round reads, D_w of book 8.2.1."""
        return self.num_params_read * dtype_bytes(dtype or self.dtype)

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes of K and V that one token leaves in all layers: 2 · layers · KV heads · head_dim · bytes (8.1.2)."""
        return 2 * self.num_hidden_layers * self.kv_size * dtype_bytes(dtype or self.dtype)

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
            theta, scaling = _rope(config)
            return cls(
                architecture=architecture,  # type: ignore[arg-type]
                num_hidden_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                num_attention_heads=heads,
                num_key_value_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // (heads or 1),  # 0 is refused by name
                intermediate_size=config["intermediate_size"],
                vocab_size=config["vocab_size"],
                tie_word_embeddings=config.get("tie_word_embeddings", False),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=config.get("max_position_embeddings", 2048),
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            )
        except KeyError as error:
            raise ModelLoadError(f"config.json lacks {error.args[0]!r}, which a {architecture} model needs") from None
        except (TypeError, AttributeError) as error:
            raise ModelLoadError(f"config.json has a value of the wrong kind: {error}") from None


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


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """(theta, scaling). transformers 5 keeps both in `rope_parameters`, 4 beside each other."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelLoadError(f"rope scaling {kind!r} is not supported, only 'default' and 'llama3'")
    fields = [field.name for field in dataclasses.fields(Llama3RopeScaling)]
    if any(name not in rope for name in fields):
        raise ModelLoadError(f"rope scaling llama3 needs {', '.join(fields)}; config.json has {sorted(rope)}")
    return theta, Llama3RopeScaling(**{name: rope[name] for name in fields})
