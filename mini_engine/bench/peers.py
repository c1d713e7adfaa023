"""transformers over the very tensors of our model, to run beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mini_engine.mla import MLADecoder
from mini_engine.model import Decoder

_SHARED_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rms_norm_eps",
)


def transformers_twin(decoder: Decoder | MLADecoder) -> Any:
    """transformers' model over the very tensors of ours, without a second copy but for matrices that we hold in another
    dtype than the model's; None where it is not installed, and for DeepSeek, which it holds in another form: experts
    stacked, rotated rows in pairs."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        return None
    if not isinstance(decoder, Decoder):
        return None
    config = decoder.config
    shape = {name: getattr(config, name) for name in _SHARED_NAMES}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **vars(config.rope_scaling)}
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[config.architecture]
    with torch.device("meta"):
        model = model_class(config_class(**shape, rope_parameters=rope)).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    tensors = {name: tensor.to(decoder.embedding.dtype) for name, tensor in _hf_names(decoder)}
    model.load_state_dict(tensors, assign=True, strict=not config.tie_word_embeddings)
    model.tie_weights()
    model.generation_config.eos_token_id = None  # it shall generate as many tokens as it is told
    return model.requires_grad_(False)


def _hf_names(decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's names for views into our tensors."""
    config = decoder.config
    yield "model.embed_tokens.weight", decoder.embedding
    yield "model.norm.weight", decoder.norm
    yield "lm_head.weight", decoder.head.weight
    for i, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{i}."
        rows = [config.q_size, config.kv_size, config.kv_size]
        for name, part in zip("qkv", layer.qkv.weight.split(rows), strict=True):
            yield f"{prefix}self_attn.{name}_proj.weight", part
        for name, part in zip(("gate", "up"), layer.gate_up.weight.chunk(2), strict=True):
            yield f"{prefix}mlp.{name}_proj.weight", part
        yield prefix + "self_attn.o_proj.weight", layer.o.weight
        yield prefix + "mlp.down_proj.weight", layer.down.weight
        yield prefix + "input_layernorm.weight", layer.input_norm
        yield prefix + "post_attention_layernorm.weight", layer.post_norm
        if layer.q_norm is not None and layer.k_norm is not None:
            yield prefix + "self_attn.q_norm.weight", layer.q_norm
            yield prefix + "self_attn.k_norm.weight", layer.k_norm
