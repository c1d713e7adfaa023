"""What each card holds when a dense model is cut by tensor parallelism.

Attention is cut by heads, the FFN by its inner width, both embeddings by rows of the vocabulary; every card has all
norms. With more cards than KV heads, each KV head is held by several of them, and KV per card stops shrinking.
Source: Shoeybi et al., "Megatron-LM" (2019); vLLM's `QKVParallelLinear` for the replicated KV heads.
"""

from __future__ import annotations

from mini_engine.analysis.formats import NumberFormat
from mini_engine.analysis.inputs import AnalysisError, dense, whole
from mini_engine.analysis.memory import kv_bytes_per_token, native_format
from mini_engine.config import ModelConfig


def kv_heads_per_card(model: ModelConfig, cards: int) -> int:
    """KV heads of each card. Raises AnalysisError for a number of cards that does not divide the heads."""
    whole(1, cards=cards)
    dense(model, "what a card holds")
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % cards or max(kv_heads, cards) % min(kv_heads, cards) or model.intermediate_size % cards:
        raise AnalysisError(
            f"{cards} cards cannot share {heads} query heads, {kv_heads} KV heads and an FFN of "
            f"{model.intermediate_size} evenly"
        )
    return max(1, kv_heads // cards)


def kv_bytes_per_token_per_card(model: ModelConfig, cards: int, kv: NumberFormat | None = None) -> int:
    """Bytes one token leaves on each card."""
    return kv_bytes_per_token(model, kv) // model.num_key_value_heads * kv_heads_per_card(model, cards)


def weight_bytes_per_card(model: ModelConfig, cards: int, weights: NumberFormat | None = None) -> int:
    """Bytes of weights on each card; the vocabulary is rounded up to whole rows a card."""
    kv_width = kv_heads_per_card(model, cards) * model.head_dim
    attention = model.hidden_size * (2 * model.q_size // cards + 2 * kv_width)
    ffn = 3 * model.hidden_size * model.intermediate_size // cards
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    embeddings = (1 if model.tie_word_embeddings else 2) * -(-model.vocab_size // cards) * model.hidden_size
    values = model.num_hidden_layers * (attention + ffn + norms) + embeddings + model.hidden_size
    return (weights or native_format(model)).bytes_for(values)
