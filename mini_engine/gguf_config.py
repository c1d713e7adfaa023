"""The metadata of a GGUF file as a ModelConfig, and a refusal of every setting this engine would ignore.

Source: the keys are those of the gguf package's `constants.py`; llama.cpp's `convert_hf_to_gguf.py` stores llama3 rope
scaling not as a setting but as a tensor, one factor for each frequency.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mini_engine.config import ModelConfig
from mini_engine.errors import ModelLoadError
from mini_engine.gguf import GGUFFile

ARCHITECTURES = ("llama", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
# Settings this engine does not compute, and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from the metadata. Raises ModelLoadError for what is missing or would be ignored."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(f"architecture {architecture!r} is not supported, only {' and '.join(ARCHITECTURES)}")
    arch = _Metadata(metadata, architecture)
    arch.refuse_unless_neutral()
    heads, hidden = arch.count("attention.head_count"), arch.count("embedding_length")
    head_dim = arch.count("attention.key_length", arch.count("rope.dimension_count", hidden // max(heads, 1)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (width := arch.count(key, head_dim)) != head_dim:
            raise ModelLoadError(f"{architecture}.{key} is {width}, other than the width {head_dim} of the key heads")
    embedding = file.tensors.get("token_embd.weight")
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=arch.count("block_count"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=arch.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=arch.count("feed_forward_length"),
        vocab_size=arch.count("vocab_size", embedding.shape[0] if embedding else None),
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_theta=arch.number("rope.freq_base", 10_000.0),
        rope_factors=_rope_factors(file, head_dim),
        max_position_embeddings=arch.count("context_length"),
        rms_norm_eps=arch.number("attention.layer_norm_rms_epsilon"),
        dtype=_dtype(file),
    )


def _dtype(file: GGUFFile) -> str:
    """The dtype the matrices are closest to; for quantised ones bfloat16, whose range no scale can leave."""
    types = {info.type_name for info in file.tensors.values() if len(info.shape) == 2}
    if types == {"F32"}:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _rope_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise ModelLoadError(
            f"{ROPE_FACTORS} must be F32 [{head_dim // 2}], half of the width of a head; it is {info.type_name} "
            f"{list(info.shape)}"
        )
    factors = file.raw(info).view("<f4")[0].tolist()
    return None if all(factor == 1 for factor in factors) else tuple(factors)


class _Metadata:
    """The keys of one architecture, `llama.block_count` and its like, with their types checked."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.values, self.architecture = metadata, architecture

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # per layer, and the same in all of them
        if value is None:
            raise ModelLoadError(f"the metadata lacks {self.architecture}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelLoadError(f"{self.architecture}.{key} must be one positive whole number, got {str(value)[:60]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ModelLoadError(f"{self.architecture}.{key} must be one positive number, got {str(value)[:60]}")
        # The file stores float32: the shortest decimal that means the same is what the author wrote (1e-05).
        return float(str(np.float32(value)))

    def refuse_unless_neutral(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.values.get(f"{self.architecture}.{key}", neutral[0])
            if value not in neutral:
                raise ModelLoadError(f"{self.architecture}.{key} is {value!r}, which this engine does not compute")
