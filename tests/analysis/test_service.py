"""Adapters, ledgers, time lines and objectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    BF16,
    QWEN3_8B,
    AnalysisError,
    GiB,
    Instance,
    Ledger,
    Objective,
    attainment,
    batch_fill_wait,
    decode_throughput,
    goodput,
    lora_bytes,
    lora_intensity,
    lora_read_bytes,
    request_timeline,
    requests_beside_adapters,
    rows_per_adapter,
    total_seconds,
    weight_bytes,
    weight_bytes_per_card,
    weight_intensity,
)
from mini_engine.config import ModelConfig
from mini_engine.metrics import RequestMetrics
from tests.analysis.strategies import layer_tensors, models

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@given(models(), st.integers(1, 64), st.sets(st.sampled_from(MATRICES)))
def test_an_adapter_is_two_thin_matrices_for_each_it_corrects(model: ModelConfig, rank: int, names: set[str]) -> None:
    values = 0
    for _ in range(model.num_hidden_layers):
        for name in names:
            out_features, in_features = layer_tensors(model)[name]
            values += in_features * rank + rank * out_features
    assert lora_bytes(model, rank, [f"{name}_proj" for name in names]) == 2 * values


def test_an_unknown_matrix_is_refused() -> None:
    with pytest.raises(AnalysisError, match="no matrix 'wq', only q_proj"):
        lora_bytes(QWEN3_8B, 16, ["wq"])


def test_rows_of_a_mixed_batch() -> None:
    batch = ["law", "law", None, "medicine", "law"]
    assert rows_per_adapter(batch) == {"law": 3, "medicine": 1}
    assert lora_intensity(batch) == 2
    assert lora_read_bytes(batch, 10) == 20


@given(st.integers(1, 64), st.integers(1, 64))
def test_more_adapters_share_less(requests: int, adapters: int) -> None:
    batch = [index % adapters for index in range(requests)]
    assert lora_intensity(batch) == pytest.approx(weight_intensity(requests, BF16) / min(adapters, requests))


def test_a_batch_without_adapters_has_no_low_rank_work() -> None:
    with pytest.raises(AnalysisError, match="no request of the batch uses an adapter"):
        lora_intensity([None, None])


@given(st.integers(0, 10**6), st.integers(0, 20), st.integers(0, 10**4), st.integers(1, 10**5))
def test_requests_beside_adapters(free: int, adapters: int, adapter: int, request: int) -> None:
    fit = requests_beside_adapters(free, adapters, adapter, request)
    room = free - adapters * adapter
    assert fit * request <= max(room, 0) < (fit + 1) * request


BYTES = st.integers(0, 100)


@given(BYTES, BYTES, BYTES, BYTES, BYTES)
def test_a_ledger_fits_if_its_sum_does(capacity: int, weights: int, kv: int, activations: int, buffers: int) -> None:
    ledger = Ledger(capacity, weights, kv, activations, buffers)
    assert ledger.fits == (weights + kv + activations + buffers <= capacity)
    assert ledger.free == capacity - weights - kv - activations - buffers
    assert (ledger.broken_by is None) == ledger.fits


@pytest.mark.parametrize(
    "held, term",
    [
        ({"weights": 11}, "weights"),
        ({"weights": 9, "buffers": 2}, "buffers"),
        ({"weights": 5, "activations": 6, "kv": 9}, "activations"),
        ({"weights": 5, "activations": 2, "buffers": 2, "kv": 2}, "kv"),
        ({"weights": 5, "activations": 2, "buffers": 2, "kv": 1}, None),
    ],
)
def test_the_term_that_breaks_a_ledger(held: dict[str, int], term: str | None) -> None:
    assert Ledger(capacity=10, **held).broken_by == term


def test_free_memory_of_one_card_does_not_help_another() -> None:
    instance = Instance((Ledger(10, weights=4), Ledger(10, weights=11)))
    assert sum(card.free for card in instance.cards) > 0
    assert (instance.fits, instance.tightest, instance.free) == (False, 1, -1)


def test_two_cards_of_the_books_model() -> None:
    """Half of every matrix, all norms: 7.63 GiB a card, where one card holds 15.26."""
    shard = weight_bytes_per_card(QWEN3_8B, 2)
    assert 2 * shard - weight_bytes(QWEN3_8B) == 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert shard / GiB == pytest.approx(7.63, abs=0.005)


def test_an_instance_needs_a_card() -> None:
    with pytest.raises(AnalysisError, match="at least one card"):
        Instance(())


GAPS = st.floats(1e-3, 0.1)


@given(GAPS, GAPS, GAPS, st.integers(1, 50), st.lists(GAPS, max_size=4))
def test_time_line(queue: float, prefill: float, gap: float, outputs: int, inserted: list[float]) -> None:
    inserted = inserted[: outputs - 1]
    request = request_timeline(queue, prefill, gap, outputs, inserted)
    assert request.queue_time == queue
    assert request.ttft == pytest.approx(queue + prefill)
    assert request.itl == pytest.approx([gap + extra for extra in inserted] + [gap] * (outputs - 1 - len(inserted)))
    assert total_seconds(request) == pytest.approx(queue + prefill + gap * (outputs - 1) + sum(inserted))


def test_more_inserts_than_gaps_are_refused() -> None:
    with pytest.raises(AnalysisError, match="2 outputs have 1 gaps, too few for 2 inserted rounds"):
        request_timeline(0, 0.1, 0.1, 2, [0.1, 0.1])


REQUEST = RequestMetrics(arrival=1.0, token_times=[1.5, 1.75, 2.5])  # TTFT 0.5, gaps 0.25 and 0.75, 1.5 in all


@pytest.mark.parametrize(
    "objective, broken",
    [
        (Objective(), ()),
        (Objective(ttft_s=0.5, gap_s=0.75, total_s=1.5), ()),  # met exactly is met
        (Objective(ttft_s=0.49), ("ttft",)),
        (Objective(gap_s=0.74), ("gap",)),
        (Objective(total_s=1.49), ("total",)),
        (Objective(ttft_s=0.1, gap_s=0.1, total_s=0.1), ("ttft", "gap", "total")),
    ],
)
def test_which_limit_is_broken(objective: Objective, broken: tuple[str, ...]) -> None:
    assert objective.broken_by(REQUEST) == broken


def test_a_request_without_tokens_meets_no_limit() -> None:
    assert Objective(gap_s=9).broken_by(RequestMetrics(arrival=0)) == ("gap",)
    with pytest.raises(AnalysisError, match="no token"):
        total_seconds(RequestMetrics(arrival=0))


def test_the_clock_of_goodput_starts_at_the_planned_arrival() -> None:
    """Pitfall 9: one at a time, a request a second planned and 1.5 s of work each. From submission all are in time."""
    objective, ends = Objective(total_s=2), [1.5, 3.0, 4.5, 6.0]
    from_submission = [RequestMetrics(arrival=end - 1.5, token_times=[end]) for end in ends]
    from_plan = [RequestMetrics(arrival=float(index), token_times=[end]) for index, end in enumerate(ends)]
    assert goodput(from_submission, objective, window_s=6) == pytest.approx(4 / 6)
    assert goodput(from_plan, objective, window_s=6) == pytest.approx(2 / 6)
    assert attainment(from_plan, objective) == 0.5
    assert attainment([], objective) == 1


@given(st.integers(1, 50), st.floats(0.1, 100))
def test_waiting_for_a_batch_to_fill(batch: int, rate: float) -> None:
    arrivals = [index / rate for index in range(batch)]
    waits = [arrivals[-1] - arrival for arrival in arrivals]
    assert batch_fill_wait(batch, rate) == (pytest.approx(sum(waits) / batch), pytest.approx(max(waits)))


def test_throughput() -> None:
    assert decode_throughput(8, 0.04) == pytest.approx(200)
