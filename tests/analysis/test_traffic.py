"""Reads, roofline, least time of a round: crossings found by trying one batch, or one context, after the other."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mini_engine.analysis import (
    BF16,
    FP8,
    FP32,
    Q4_0,
    Q8_0,
    QWEN3_8B,
    RTX_PRO_6000,
    AnalysisError,
    Hardware,
    NumberFormat,
    attainable_flops,
    compute_bound_batch,
    compute_bound_context,
    crossover_batch,
    decode_flops,
    decode_intensity,
    decode_step,
    forward_flops,
    get_model,
    kv_bytes,
    mbu,
    mfu,
    prefill_step,
    read_bytes_per_token,
    ridge_point,
    round_read_bytes,
    seconds_at,
    separate_store_gain,
    separate_store_read_bytes_per_token,
    weight_intensity,
    weight_read_bytes,
)
from mini_engine.config import ModelConfig
from tests.analysis.strategies import models

FORMATS = st.sampled_from([BF16, FP8, Q8_0, Q4_0])


def card(peak: float, bandwidth: float) -> Hardware:
    return Hardware("test card", bandwidth, {"float32": peak, "float16": peak, "bfloat16": peak})


CARDS = st.builds(card, st.floats(1e9, 1e15), st.floats(1e8, 1e13))


@given(models(), st.integers(1, 30), st.integers(0, 100), FORMATS, FORMATS)
def test_reads_of_a_round(
    model: ModelConfig, batch: int, context: int, weights: NumberFormat, kv: NumberFormat
) -> None:
    total = weight_read_bytes(model, weights)
    for _ in range(batch):
        total += kv_bytes(model, context, kv)
    assert round_read_bytes(model, batch, context, weights, kv) == total
    assert read_bytes_per_token(model, batch, context, weights, kv) == pytest.approx(total / batch, rel=1e-12)


@given(models(), st.integers(1, 3000), FORMATS)
def test_crossover_is_the_first_batch_that_reads_more_kv(model: ModelConfig, context: int, kv: NumberFormat) -> None:
    weights, one = weight_read_bytes(model), kv_bytes(model, context, kv)
    assume(weights / one < 5000)
    batch = 1
    while batch * one < weights:
        batch += 1
    assert crossover_batch(model, context, kv=kv) == batch


def test_crossover_of_other_models_and_formats() -> None:
    """A laptop's SmolLM2 crosses near 6 requests at 2K in float32 weights and KV; q4_0 moves the book's 51 to 179."""
    assert crossover_batch(get_model("smollm2-135m"), 2048, FP32, FP32) == 6
    assert crossover_batch(QWEN3_8B, 2048, kv=Q4_0) == 179


@given(models(), st.integers(1, 64), st.integers(1, 2000))
def test_a_separate_store_leaves_the_kv_to_read(model: ModelConfig, batch: int, context: int) -> None:
    kv = separate_store_read_bytes_per_token(model, context)
    assert kv == kv_bytes(model, context)
    assert separate_store_gain(model, batch, context) == pytest.approx(1 + weight_read_bytes(model) / batch / kv)


@given(models(), CARDS, st.integers(1, 40), st.integers(0, 500))
def test_least_time_of_a_decode_round(model: ModelConfig, hardware: Hardware, batch: int, context: int) -> None:
    step = decode_step(model, hardware, batch, context)
    compute = sum(decode_flops(model, context) for _ in range(batch)) / hardware.peak(model.dtype)
    read = round_read_bytes(model, batch, context) / hardware.bandwidth
    assert step.compute_s == pytest.approx(compute)
    assert step.read_s == pytest.approx(read)
    assert step.seconds == max(step.compute_s, step.read_s)
    assert step.bound == ("compute" if step.compute_s >= step.read_s else "memory")


def test_a_store_of_weights_works_beside_the_cards_memory() -> None:
    kv_s = 16 * kv_bytes(QWEN3_8B, 2048) / RTX_PRO_6000.bandwidth
    weights = weight_read_bytes(QWEN3_8B)
    assert decode_step(QWEN3_8B, RTX_PRO_6000, 16, 2048, weight_bandwidth=math.inf).read_s == pytest.approx(kv_s)
    assert decode_step(QWEN3_8B, RTX_PRO_6000, 16, 2048, weight_bandwidth=weights / 0.01).read_s == pytest.approx(0.01)
    with pytest.raises(AnalysisError, match="weight_bandwidth must be above 0"):
        decode_step(QWEN3_8B, RTX_PRO_6000, 16, 2048, weight_bandwidth=0)


@given(models(), CARDS, st.integers(0, 300), FORMATS)
def test_first_compute_bound_batch(model: ModelConfig, hardware: Hardware, context: int, kv: NumberFormat) -> None:
    found = compute_bound_batch(model, hardware, context, kv=kv)
    peak, bandwidth = Fraction(hardware.peak(model.dtype)), Fraction(hardware.bandwidth)

    def computes_longer(batch: int) -> bool:
        compute = batch * decode_flops(model, context) / peak
        return compute >= round_read_bytes(model, batch, context, kv=kv) / bandwidth

    if found is None:
        assert not any(computes_longer(batch) for batch in (1, 2, 1000, 10**9, 10**15))
    else:
        assert computes_longer(found)
        assert found == 1 or not computes_longer(found - 1)


@given(models(), CARDS, FORMATS)
def test_longest_context_with_a_compute_bound_batch(model: ModelConfig, hardware: Hardware, kv: NumberFormat) -> None:
    longest = compute_bound_context(model, hardware, kv)
    if longest is None:
        assert compute_bound_batch(model, hardware, 10**7, kv=kv) is not None
    else:
        assert compute_bound_batch(model, hardware, longest, kv=kv) is not None
        assert compute_bound_batch(model, hardware, longest + 1, kv=kv) is None


@given(models(), CARDS, st.integers(1, 50), st.integers(0, 50), st.integers(1, 4))
def test_least_time_of_a_prefill(model: ModelConfig, hardware: Hardware, new: int, history: int, batch: int) -> None:
    step = prefill_step(model, hardware, new, history, batch)
    compute = batch * forward_flops(model, new, history) / hardware.peak(model.dtype)
    read = (weight_read_bytes(model) + batch * kv_bytes(model, history)) / hardware.bandwidth
    assert (step.compute_s, step.read_s) == (pytest.approx(compute), pytest.approx(read))
    assert seconds_at(step, mfu=0.5, mbu=0.25) == pytest.approx(max(2 * compute, 4 * read))


def test_roofline_meets_at_the_ridge() -> None:
    ridge = ridge_point(RTX_PRO_6000)
    assert ridge == pytest.approx(281.1, abs=0.1)
    assert attainable_flops(RTX_PRO_6000, ridge / 2) == pytest.approx(503.8e12 / 2)
    assert attainable_flops(RTX_PRO_6000, ridge * 2) == 503.8e12


@given(models(), st.integers(1, 100), st.integers(0, 200))
def test_intensity_of_a_round_is_operations_over_bytes(model: ModelConfig, batch: int, context: int) -> None:
    operations = batch * forward_flops(model, 1, context)
    assert decode_intensity(model, batch, context) == pytest.approx(
        operations / round_read_bytes(model, batch, context)
    )


@pytest.mark.parametrize("batch, weights, intensity", [(1, BF16, 1), (16, BF16, 16), (16, FP8, 32), (8, FP32, 4)])
def test_weight_intensity(batch: int, weights: NumberFormat, intensity: float) -> None:
    assert weight_intensity(batch, weights) == intensity


def test_utilisations_of_a_round_at_the_bound_are_one() -> None:
    decode = decode_step(QWEN3_8B, RTX_PRO_6000, 4, 2048)
    assert mbu(round_read_bytes(QWEN3_8B, 4, 2048), decode.read_s, RTX_PRO_6000) == pytest.approx(1)
    assert mbu(round_read_bytes(QWEN3_8B, 4, 2048), 2 * decode.read_s, RTX_PRO_6000) == pytest.approx(0.5)
    prefill = prefill_step(QWEN3_8B, RTX_PRO_6000, 2048)
    assert mfu(forward_flops(QWEN3_8B, 2048), 4 * prefill.compute_s, RTX_PRO_6000) == pytest.approx(0.25)
