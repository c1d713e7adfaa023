"""A tiny random Llama in a directory, made on the spot: real tensors for runs in which no answer is read (lab 10-1).

    config.json   model.safetensors   tokenizer.json (a token a byte)

Seeded, so that every process and every machine that makes it has the same model. Nothing but what the engine itself
needs is used.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mini_engine.checkpoint import expected_shapes
from mini_engine.model_config import ModelConfig

SPREAD = 0.1  # of the weights: logits then differ enough for a greedy choice to be no toss-up


def save_tiny_llama(
    directory: Path | str,
    num_attention_heads: int = 8,
    num_key_value_heads: int = 1,
    num_hidden_layers: int = 4,
    head_dim: int = 32,
    hidden_size: int = 256,
    max_position_embeddings: int = 8192,
    seed: int = 0,
) -> str:
    """Make the model in `directory`; returns its path, which `LLM` and `mini-engine serve` take for `model`.

    It has no end token, so that every request runs for all of its max_tokens.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else SPREAD * torch.randn(shape, generator=draw)
        for name, shape in expected_shapes(ModelConfig.from_hf(config)).items()
    }
    save_file(tensors, path / "model.safetensors")
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def byte_tokenizer() -> Tokenizer:
    """Byte-level, without merges: 256 tokens, and any text has as many as it has bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
