"""Operations of a forward pass. A multiply-add counts as two; norms, rotations and softmax are left out.

matrix work   2 · (parameters of the layers' matrices), for every new token
attention     2 · query heads · (width of a key + of a value) a layer, for every causal pair: scores, then weighted sum
LM head       2 · vocabulary · hidden, for every row whose logits are wanted
"""

from __future__ import annotations

from mini_engine.analysis.inputs import whole
from mini_engine.config import ModelConfig


def causal_pairs(new: int, history: int = 0) -> int:
    """Query-key pairs of `new` tokens after `history` earlier ones: c·h + c(c+1)/2 (book 8.2.3).

    A rectangle, every new token with every old one, and a triangle: each new token with itself and those before it.
    """
    whole(0, new=new, history=history)
    return new * history + new * (new + 1) // 2


def linear_flops_per_token(model: ModelConfig) -> int:
    """Operations of one token in the projections and FFNs of all layers; of experts, in those it is sent to."""
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    if model.mla:
        norms += model.mla.kv_lora_rank + (model.mla.q_lora_rank or 0)
    outside = model.embedding_params + model.hidden_size
    return 2 * (model.num_params_read - outside - model.num_hidden_layers * norms)


def flops_per_pair(model: ModelConfig) -> int:
    """Operations of one causal pair in all layers: q·k and the share in the sum of values, for every query head.

    Of latent attention in its naive form, that of long chunks; absorbed, a pair takes some 3 times as many.
    """
    return 2 * model.num_hidden_layers * (model.q_size + model.o_size)


def lm_head_flops(model: ModelConfig, rows: int = 1) -> int:
    """Operations that turn `rows` hidden states into logits."""
    whole(0, rows=rows)
    return 2 * rows * model.vocab_size * model.hidden_size


def forward_flops(model: ModelConfig, new: int, history: int = 0, logit_rows: int = 1) -> int:
    """Operations of one sequence's forward pass over `new` tokens after `history` cached ones.

    logit_rows: 1 where the pass yields a token, 0 where it does not (all but the last chunk of a prompt, a prefix
        computed for the cache), `new` where drafts are verified.
    """
    linear = new * linear_flops_per_token(model)
    return linear + causal_pairs(new, history) * flops_per_pair(model) + lm_head_flops(model, logit_rows)


def decode_flops(model: ModelConfig, context: int) -> int:
    """Operations of one output token after `context` cached ones, F of book 8.2.1."""
    return forward_flops(model, 1, context)
