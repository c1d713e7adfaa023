"""Tiny random models on disk, for tests: Hugging Face directories made by transformers, and GGUF files of them.

Random norms as well as matrices, and logits far apart: a tensor read into the wrong place changes greedy tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and the cat, again and again",
    "def add(a, b):\n    return a + b\n",
    "một hai ba bốn năm, tiếng Việt có dấu",
    "there is no other place where the weather is better than here",
]
_SHAPE = {
    # All widths differ, so that a transposed matrix cannot go unnoticed, and are multiples of GGUF's blocks of 32.
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def tiny_tokenizer(vocab_size: int = 320, add_bos: bool = False) -> Tokenizer:
    """A byte-level BPE that can encode anything: 3 special tokens, 256 bytes, some merges. Digits one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if add_bos:
        bos = SPECIAL_TOKENS[BOS]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    return tokenizer


def tiny_llama_dir(directory: Path, name: str = "tiny-llama", **overrides: Any) -> Path:
    """Save a tiny random Llama under directory/name. overrides: of LlamaConfig, e.g. tie_word_embeddings=True or
    rope_scaling=LLAMA3_SCALING; `seed`, `dtype` and `max_shard_size` besides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(directory / name, LlamaConfig, LlamaForCausalLM, overrides)


def tiny_qwen3_dir(directory: Path, name: str = "tiny-qwen3", **overrides: Any) -> Path:
    """The same with a tiny random Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(directory / name, Qwen3Config, Qwen3ForCausalLM, overrides)


YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
_MLA_SHAPE = {
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}


def tiny_deepseek_v2_dir(directory: Path, name: str = "tiny-deepseek-v2", **overrides: Any) -> Path:
    """The same with a tiny random DeepSeek-V2: latent attention, experts from layer 1 on. overrides: q_lora_rank=40,
    rope_parameters=YARN_SCALING, topk_method="group_limited_greedy" with n_group and topk_group, and the like."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    shape = {**_MLA_SHAPE, "num_hidden_layers": 3, "num_key_value_heads": 4, **overrides}
    return _save(directory / name, DeepseekV2Config, DeepseekV2ForCausalLM, shape)


def _save(path: Path, config_class: Any, model_class: Any, overrides: dict[str, Any]) -> Path:
    seed, shard = overrides.pop("seed", 0), overrides.pop("max_shard_size", "1GB")
    dtype = overrides.pop("dtype", torch.float32)
    tokenizer = tiny_tokenizer()
    settings = {"tie_word_embeddings": False, "vocab_size": tokenizer.get_vocab_size(), **_SHAPE, **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**settings))
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.to(dtype).save_pretrained(path, max_shard_size=shard)
    save_tokenizer(path, tokenizer)
    return path


def save_tokenizer(path: Path, tokenizer: Tokenizer, **config: Any) -> None:
    """tokenizer.json and a tokenizer_config.json with the special tokens and a chat template."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def to_gguf(directory: Path, path: Path, type_name: str = "F32", edit: Edit | None = None) -> Path:
    """Convert as llama.cpp does: its names, permuted Q and K rows of a Llama, llama3 scaling as rope_freqs.weight.

    type_name: of the matrices (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0); norms stay F32, and so do matrices whose
    rows are no multiple of the block. edit(metadata, tensors): change either before it is written, to make a bad file.
    """
    import gguf

    config = json.loads((directory / "config.json").read_text())
    arch = config["model_type"]
    metadata, tensors = _gguf_metadata(directory, config), _gguf_tensors(directory, config)
    if edit is not None:
        edit(metadata, tensors)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", arch))
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    quant = gguf.GGMLQuantizationType[type_name]
    block = gguf.GGML_QUANT_SIZES[quant][0]
    for name, array in tensors.items():
        if array.ndim == 1 or array.shape[-1] % block or type_name == "F32":
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_metadata(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    arch = config["model_type"]
    rope = config.get("rope_parameters") or {}
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "general.name": directory.name,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gguf_tensors(directory: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    import gguf
    from safetensors.torch import load_file

    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            array = tensor.float().numpy()
            if arch == gguf.MODEL_ARCH.LLAMA and name.endswith("q_proj.weight"):
                array = _permute(array, config["num_attention_heads"])
            if arch == gguf.MODEL_ARCH.LLAMA and name.endswith("k_proj.weight"):
                array = _permute(array, config["num_key_value_heads"])
            tensors[names.get_name(name, try_suffixes=(".weight",)) or name] = array
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(rope, config["head_dim"])
    return tensors


def _permute(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion: row (half, i) of a head goes to row (i, half)."""
    rows = array.shape[0] // heads
    return np.ascontiguousarray(array.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(array.shape))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """llama.cpp's conversion: by how much each frequency is divided."""
    factors = []
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.get("rope_theta", 10_000.0) ** (exponent / head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
