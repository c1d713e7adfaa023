"""Operations against brute force, and against torch's own counter on a transformers model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    QWEN3_8B,
    causal_pairs,
    decode_flops,
    flops_per_pair,
    forward_flops,
    linear_flops_per_token,
    lm_head_flops,
)
from mini_engine.analysis.inputs import AnalysisError
from mini_engine.analysis.lora import matrix_shapes
from mini_engine.analysis.shards import kv_heads_per_card
from mini_engine.config import ModelConfig
from mini_engine.mla_config import MLAShape, MoEShape
from tests.analysis.strategies import layer_tensors, models, size


@given(st.integers(0, 60), st.integers(0, 60))
def test_pairs_are_counted_one_by_one(new: int, history: int) -> None:
    pairs = sum(1 for query in range(history, history + new) for key in range(query + 1))
    assert causal_pairs(new, history) == pairs


@given(models(), st.integers(0, 12), st.integers(0, 12), st.integers(0, 3))
def test_operations_matrix_by_matrix(model: ModelConfig, new: int, history: int, logit_rows: int) -> None:
    matrices = [shape for shape in layer_tensors(model).values() if len(shape) == 2]
    total = 0
    for _ in range(model.num_hidden_layers):
        total += sum(2 * size(shape) * new for shape in matrices)
        for query in range(history, history + new):
            for _ in range(model.num_attention_heads):
                total += (query + 1) * (2 * model.head_dim + 2 * model.head_dim)  # q·k, then the share in the sum
    total += 2 * logit_rows * model.vocab_size * model.hidden_size
    assert forward_flops(model, new, history, logit_rows) == total


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 100))
def test_chunks_add_up_to_the_whole(prompt: int, history: int, cut: int) -> None:
    cut = min(cut, prompt)
    parts = forward_flops(QWEN3_8B, cut, history, 0) + forward_flops(QWEN3_8B, prompt - cut, history + cut, 1)
    assert parts == forward_flops(QWEN3_8B, prompt, history)


def test_constants_of_the_books_model() -> None:
    """The record of experiment 8-1: per layer and token, per layer and pair, LM head, prefill of 2048."""
    assert linear_flops_per_token(QWEN3_8B) == 36 * 385_875_968
    assert flops_per_pair(QWEN3_8B) == 36 * 16_384
    assert lm_head_flops(QWEN3_8B) == 1_244_659_712
    assert forward_flops(QWEN3_8B, 2048) == 29_688_662_589_440
    assert decode_flops(QWEN3_8B, 2048) == 36 * (385_875_968 + 2049 * 16_384) + 1_244_659_712


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_torch_counts_the_same_in_transformers(architecture: str) -> None:
    """Eager attention computes masked pairs too and throws them away: the counter sees those, so they are added."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    model = ModelConfig(architecture, 3, 96, 6, 2, 32, 160, 500, False, dtype="float32")  # type: ignore[arg-type]
    names = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
    config = getattr(transformers, names[architecture])(
        num_hidden_layers=3,
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=160,
        vocab_size=500,
        attn_implementation="eager",
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for new, history in [(7, 0), (1, 11), (5, 9)]:
            cache = transformers.DynamicCache()
            if history:
                network(torch.zeros(1, history, dtype=torch.long), cache=cache)
            counter = FlopCounterMode(display=False)
            with counter:
                network(torch.zeros(1, new, dtype=torch.long), cache=cache, logits_to_keep=1)
            masked = new * (history + new) - causal_pairs(new, history)
            ours = forward_flops(model, new, history) + masked * flops_per_pair(model)
            assert counter.get_total_flops() == ours


def test_latent_attention_and_experts() -> None:
    """DeepSeek-V2-Lite by hand: the matrices that a token meets, and both halves of a pair in the naive form."""
    mla = MLAShape(None, 512, 128, 64, 128)
    moe = MoEShape(64, 6, 1408, n_shared_experts=2, first_k_dense_replace=1)
    model = ModelConfig("deepseek_v2", 27, 2048, 16, 1, 192, 10944, 102400, False, mla=mla, moe=moe)
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    experts = 2048 * 64 + (6 + 2) * 3 * 2048 * 1408
    by_hand = 2 * (27 * attention + 3 * 2048 * 10944 + 26 * experts)
    assert linear_flops_per_token(model) == by_hand
    assert flops_per_pair(model) == 2 * 27 * 16 * (192 + 128)


def test_adapters_and_shards_of_other_than_dense_models_are_refused() -> None:
    mla = MLAShape(None, 32, 16, 8, 16)
    model = ModelConfig("deepseek_v2", 2, 64, 4, 1, 24, 96, 320, False, mla=mla)
    for question in (lambda: matrix_shapes(model), lambda: kv_heads_per_card(model, 2)):
        with pytest.raises(AnalysisError, match="dense models with GQA, not for deepseek_v2"):
            question()
