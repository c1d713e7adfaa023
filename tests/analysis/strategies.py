"""Random small models, and their tensors written out one by one, as an independent count."""

from __future__ import annotations

from hypothesis import strategies as st

from mini_engine.config import ModelConfig


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Dense decoders of every ratio of heads; head_dim a multiple of 32, so that grouped formats fit."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    return ModelConfig(
        architecture=draw(st.sampled_from(["llama", "qwen3"])),
        num_hidden_layers=draw(st.integers(1, 6)),
        hidden_size=draw(st.integers(1, 8)) * 32,
        num_attention_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64])),
        intermediate_size=draw(st.integers(1, 8)) * 64,
        vocab_size=draw(st.integers(1, 1000)),
        tie_word_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "float16", "bfloat16"])),
    )


def layer_tensors(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of each tensor of one layer."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    if model.architecture == "qwen3":
        tensors |= {"q_norm": (model.head_dim,), "k_norm": (model.head_dim,)}
    return tensors


def size(shape: tuple[int, ...]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
