"""A GGUF file as a Checkpoint: llama.cpp's names, metadata and row order translated to Hugging Face's.

Source: gguf's `constants.py` for the keys, llama.cpp's `convert_hf_to_gguf.py` for what the converter changes: it
permutes the rows of Q and K of `llama` models (not of `qwen3`) and stores llama3 rope scaling as factors by frequency.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_engine.checkpoint import check_target, check_tensors
from mini_engine.config import ModelConfig
from mini_engine.errors import ModelLoadError
from mini_engine.gguf import GGUFFile, TensorInfo
from mini_engine.gguf_tokenizer import build_tokenizer, end_of_text_ids

if TYPE_CHECKING:
    import torch

    from mini_engine.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 18  # 1 MB of float32: temporaries stay in the caches
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_TOP["output.weight"] = "lm_head.weight"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
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


class GGUFCheckpoint:
    """See checkpoint.Checkpoint. Raises ModelLoadError naming the file and the cause."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        metadata = self._file.metadata
        self.name = str(metadata.get("general.name") or path.stem)
        try:
            self.config = read_config(self._file)
            self.eos_token_ids = end_of_text_ids(metadata)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from None
        self._tensors = {_hf_name(name): info for name, info in self._file.tensors.items() if name != ROPE_FACTORS}
        check_tensors(str(path), self.config, {name: info.shape for name, info in self._tensors.items()})

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._file.path}: there is no tensor {name}")
        return self._tensors[name]

    def read(self, name: str, out: torch.Tensor) -> None:
        import torch

        from mini_engine.gguf_quants import dequantize

        info = self._info(name)
        check_target(name, info.shape, out)
        raw = self._file.raw(info)
        if out.dim() == 1:
            out.copy_(dequantize(torch.from_numpy(raw.copy()), info.type_name)[0])
        else:
            heads = self._permuted_heads(name)
            # [units, rows of a unit, columns]: a head where rows are permuted within heads, else a single row
            unit = info.shape[0] // heads if heads else 1
            target = out.unflatten(0, (-1, unit))
            step = max(1, _CHUNK_ELEMENTS // (unit * info.shape[1]))
            for start in range(0, target.shape[0], step):
                end = min(start + step, target.shape[0])
                # The copy makes torch the owner: a tensor must not outlive the map it points into.
                part = torch.from_numpy(raw[start * unit : end * unit].copy())
                rows = dequantize(part, info.type_name).view(end - start, unit, -1)
                target[start:end].copy_(_rotary_halves(rows) if heads else rows)
        del raw
        self._file.release(info)

    def _permuted_heads(self, name: str) -> int:
        """Number of heads whose rows the converter permuted, 0 for a tensor it left alone."""
        if self.config.architecture != "llama":
            return 0
        if name.endswith("q_proj.weight"):
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if name.endswith("k_proj.weight") else 0

    def tokenizer(self) -> Tokenizer:
        try:
            tokenizer = build_tokenizer(self._file.metadata)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._file.path}: {error}") from None
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ModelLoadError(
                f"{self._file.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding "
                f"{self.config.vocab_size} rows"
            )
        return tokenizer

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rotary_halves(rows: torch.Tensor) -> torch.Tensor:
    """Undo the converter's permutation: [heads, pairs x 2, columns], the two of a pair side by side (as ggml rotates
    them), to two halves one after the other (as Hugging Face rotates them)."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _hf_name(name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        layer, part, suffix = match.groups()
        if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{suffix}"
    return _TOP.get(name, name)  # an unknown name stays as it is, for the message that refuses it


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
    tokens = len(metadata.get("tokenizer.ggml.tokens") or ())
    return ModelConfig(
        architecture=architecture,
        num_hidden_layers=arch.count("block_count"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=arch.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=arch.count("feed_forward_length"),
        vocab_size=arch.count("vocab_size", embedding.shape[0] if embedding else tokens),
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
