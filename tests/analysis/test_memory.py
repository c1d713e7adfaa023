"""Weights, KV, formats and shards against tensors counted one by one."""

from __future__ import annotations

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    BF16,
    FP8,
    Q4_0,
    Q4_1,
    Q8_0,
    QWEN3_8B,
    AnalysisError,
    NumberFormat,
    ffn_bytes_per_layer,
    get_format,
    get_model,
    kv_bytes,
    kv_bytes_per_token,
    kv_bytes_per_token_per_card,
    model_names,
    resident_bytes,
    weight_bytes,
    weight_bytes_per_card,
    weight_read_bytes,
)
from mini_engine.config import DTYPE_BYTES, ModelConfig
from tests.analysis.strategies import layer_tensors, models, size

FORMATS = st.sampled_from([BF16, FP8, Q8_0, Q4_0, Q4_1])


@pytest.mark.parametrize("number_format", [Q8_0, Q4_0, Q4_1])
def test_grouped_formats_are_those_of_ggml(number_format: NumberFormat) -> None:
    quant_type = gguf.GGMLQuantizationType[number_format.name.upper()]
    assert (number_format.group, number_format.group_bytes) == gguf.GGML_QUANT_SIZES[quant_type]


@pytest.mark.parametrize("name, bits", [("float32", 32), ("bfloat16", 16), ("fp8", 8), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_bits_per_value(name: str, bits: float) -> None:
    assert get_format(name).bits_per_value == bits


def test_a_last_group_is_stored_whole() -> None:
    assert [Q8_0.bytes_for(values) for values in (0, 1, 32, 33)] == [0, 34, 34, 68]


@given(models(), FORMATS)
def test_weights_are_the_sum_of_all_tensors(model: ModelConfig, weights: NumberFormat) -> None:
    layers = model.num_hidden_layers * sum(size(shape) for shape in layer_tensors(model).values())
    embedding = model.vocab_size * model.hidden_size
    values = layers + model.hidden_size + embedding * (1 if model.tie_word_embeddings else 2)
    groups = -(-values // weights.group)
    assert weight_bytes(model, weights) == groups * weights.group_bytes
    assert weight_bytes(model) == values * DTYPE_BYTES[model.dtype] == model.weight_bytes()


@given(models())
def test_a_round_reads_all_but_an_input_embedding_of_its_own(model: ModelConfig) -> None:
    embedding = model.vocab_size * model.hidden_size * DTYPE_BYTES[model.dtype]
    unread = 0 if model.tie_word_embeddings else embedding
    assert weight_bytes(model) - weight_read_bytes(model) == unread


@given(models(), FORMATS, st.integers(0, 50))
def test_kv_is_stored_head_by_head_and_layer_by_layer(model: ModelConfig, kv: NumberFormat, tokens: int) -> None:
    total = 0
    for _ in range(tokens):
        for _ in range(model.num_hidden_layers * model.num_key_value_heads * 2):
            total += model.head_dim // kv.group * kv.group_bytes
    assert kv_bytes(model, tokens, kv) == total
    assert kv_bytes_per_token(model) == model.kv_bytes_per_token()


@given(models(), st.integers(0, 20), st.integers(0, 40), FORMATS, FORMATS)
def test_resident_is_weights_once_and_kv_for_each(
    model: ModelConfig, requests: int, tokens: int, weights: NumberFormat, kv: NumberFormat
) -> None:
    total = weight_bytes(model, weights)
    for _ in range(requests):
        total += kv_bytes(model, tokens, kv)
    assert resident_bytes(model, requests, tokens, weights, kv) == total


@given(models())
def test_ffn_of_one_layer(model: ModelConfig) -> None:
    tensors = layer_tensors(model)
    values = size(tensors["gate"]) + size(tensors["up"]) + size(tensors["down"])
    assert ffn_bytes_per_layer(model) == values * DTYPE_BYTES[model.dtype]


def test_formats_of_the_books_model() -> None:
    """Book 8.4.2: an 8K context in BF16, q8_0 and q4_0, in MiB."""
    assert [kv_bytes(QWEN3_8B, 8192, kv) / 2**20 for kv in (BF16, FP8, Q8_0, Q4_0)] == [1152, 576, 612, 324]


def test_a_group_that_does_not_divide_a_head_is_refused() -> None:
    wide = NumberFormat("wide", 256, 84, "test")
    with pytest.raises(AnalysisError, match="groups of 256 values, which do not divide a head of 128"):
        kv_bytes_per_token(QWEN3_8B, wide)


@given(models(), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_shards_hold_every_tensor_and_copies_of_what_cannot_be_cut(model: ModelConfig, cards: int) -> None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    even = heads % cards == 0 and (kv_heads % cards == 0 or cards % kv_heads == 0)
    if not even or model.intermediate_size % cards:
        with pytest.raises(AnalysisError, match=f"{cards} cards cannot share"):
            weight_bytes_per_card(model, cards)
        return
    # Each query head goes to the card of its number; a KV head to every card that has a query head of its group.
    kv_on_card = [
        {head * kv_heads // heads for head in range(heads) if head * cards // heads == card} for card in range(cards)
    ]
    itemsize = DTYPE_BYTES[model.dtype]
    kv_token = {len(held) * model.head_dim * 2 * model.num_hidden_layers * itemsize for held in kv_on_card}
    assert kv_token == {kv_bytes_per_token_per_card(model, cards)}

    tensors = layer_tensors(model)
    norms = sum(size(shape) for name, shape in tensors.items() if "norm" in name)
    cut = sum(size(tensors[name]) // cards for name in ("q", "o", "gate", "up", "down"))
    kv_matrices = 2 * len(kv_on_card[0]) * model.head_dim * model.hidden_size
    vocabulary_rows = max(len(range(card, model.vocab_size, cards)) for card in range(cards))
    matrices = 1 if model.tie_word_embeddings else 2
    values = model.num_hidden_layers * (norms + cut + kv_matrices) + model.hidden_size
    values += matrices * vocabulary_rows * model.hidden_size
    assert weight_bytes_per_card(model, cards) == values * itemsize


def test_an_ffn_that_cannot_be_cut_evenly_is_refused() -> None:
    model = ModelConfig("llama", 1, 96, 3, 1, 32, 64, 100, False)
    with pytest.raises(AnalysisError, match="3 cards cannot share 3 query heads, 1 KV heads and an FFN of 64 evenly"):
        weight_bytes_per_card(model, 3)


def test_kv_per_card_stops_shrinking_at_the_number_of_kv_heads() -> None:
    assert [kv_bytes_per_token_per_card(QWEN3_8B, cards) // 1024 for cards in (1, 2, 4, 8, 16, 32)] == [
        144,
        72,
        36,
        18,
        18,
        18,
    ]


@pytest.mark.parametrize(
    "name, parameters",  # as counted by the checkpoints on the hub
    [
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_table_of_models(name: str, parameters: int) -> None:
    assert name in model_names()
    assert weight_bytes(get_model(name), get_format("float32")) == 4 * parameters
