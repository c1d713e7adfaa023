"""Cost models against counting by brute force, the analysis' own prices, and the book's printed figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import BOOK_STEP, FP8, QWEN3_8B, RTX_PRO_6000, Chunk, FittedStep, decode_step, prefill_step
from mini_engine.errors import ConfigError
from mini_engine.scheduler import ScheduledSequence, SchedulerOutput
from mini_engine.sequence import Sequence
from mini_engine.simulator.cost import RooflineCost, StepWork, fitted_cost


def output(*parts: tuple[int, int], sampled: int = 0) -> SchedulerOutput:
    """A step of (start, number of tokens), of which the first `sampled` draw a token."""
    seqs = [Sequence(f"r{i}", [0]) for i in range(len(parts))]
    scheduled = tuple(ScheduledSequence(seq, *part) for seq, part in zip(seqs, parts, strict=True))
    return SchedulerOutput(scheduled, tuple((seqs[i], i) for i in range(sampled)), (), ())


parts = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=5)


@given(parts)
def test_the_work_of_a_step_is_what_one_can_count(parts):
    queries = [(start, query) for start, count in parts for query in range(start, start + count)]
    work = StepWork.of(output(*parts, sampled=len(parts) // 2))
    assert work.num_tokens == len(queries)
    assert work.num_pairs == sum(1 for _, query in queries for _ in range(query + 1))
    assert work.num_context_tokens == sum(len(range(start + count)) for start, count in parts)
    assert work.num_sampled == len(parts) // 2


@pytest.mark.parametrize(
    "work, ms",
    [  # figures step_decode_ms and step_prefill_ms of book 8.2.2, and the rounds of exercise 8-2
        (output((2047, 1)), 26.26),
        (output((0, 2048)), 94.8),
        (output((0, 2048), (0, 2048)), 163.3),
        (output((2049, 1), (0, 8192)), 376.0),
    ],
)
def test_the_books_rounds(work, ms):
    assert fitted_cost(BOOK_STEP)(StepWork.of(work)) * 1e3 == pytest.approx(ms, abs=0.05)


@given(parts, st.sampled_from([(), (8, 16, 64)]))
def test_a_fitted_cost_is_the_analysis_price_of_the_same_round(parts, shapes):
    step = FittedStep(26e-3, 30e-6, 3e-9, shapes)
    chunks = [Chunk(count, start) for start, count in parts]
    assert fitted_cost(step)(StepWork.of(output(*parts))) == pytest.approx(step.seconds(chunks), rel=1e-12)


def test_a_roofline_prefill_is_the_analysis_bound_at_its_efficiency():
    work = StepWork.of(output((0, 4096), sampled=1))
    bound = prefill_step(QWEN3_8B, RTX_PRO_6000, 4096)
    assert bound.bound == "compute"
    assert RooflineCost(QWEN3_8B, RTX_PRO_6000, mfu=0.5)(work) == pytest.approx(bound.compute_s / 0.5)


def test_a_roofline_decode_is_the_analysis_bound_at_its_efficiency():
    # The new token's own K and V are read too, here: a context of 2048 is 2047 old tokens and the new one.
    work = StepWork.of(output(*[(2047, 1)] * 16, sampled=16))
    bound = decode_step(QWEN3_8B, RTX_PRO_6000, 16, 2048)
    assert bound.bound == "memory"
    cost = RooflineCost(QWEN3_8B, RTX_PRO_6000, mbu=0.25, overhead_s=1e-3)
    assert cost(work) == pytest.approx(bound.read_s / 0.25 + 1e-3)


@pytest.mark.parametrize("batch, gigabytes", [(1, 15.44), (4, 16.34)])
def test_roofline_reads_of_a_decode_round(batch, gigabytes):  # figures round_read_* of book 8.6.3
    work = StepWork.of(output(*[(2047, 1)] * batch, sampled=batch))
    assert RooflineCost(QWEN3_8B, RTX_PRO_6000).read_bytes(work) / 1e9 == pytest.approx(gigabytes, abs=0.01)


def test_roofline_work_of_a_prefix():  # figure prefix_tflop of book 8.3.4: no logits
    work = StepWork.of(output((0, 6144)))
    assert RooflineCost(QWEN3_8B, RTX_PRO_6000).flops(work) / 1e12 == pytest.approx(96.5, rel=0.001)


def test_the_lm_head_works_for_sampled_rows_only():
    flops = RooflineCost(QWEN3_8B, RTX_PRO_6000).flops
    assert flops(StepWork(8, 36, 8, 3)) - flops(StepWork(8, 36, 8, 1)) == 2 * 2 * 151_936 * 4096


def test_smaller_formats_are_read_faster():
    work = StepWork(1, 10_000, 10_000, 1)
    whole = RooflineCost(QWEN3_8B, RTX_PRO_6000).read_bytes(work)
    assert RooflineCost(QWEN3_8B, RTX_PRO_6000, kv=FP8).read_bytes(work) == whole - 10_000 * 73_728
    assert RooflineCost(QWEN3_8B, RTX_PRO_6000, weights=FP8, kv=FP8).read_bytes(work) == whole / 2


@pytest.mark.parametrize("values", [{"mfu": 0.0}, {"mbu": 1.5}, {"mfu": float("nan")}, {"overhead_s": -1.0}])
def test_impossible_efficiencies_are_refused(values):
    with pytest.raises(ConfigError, match="fractions of the peak"):
        RooflineCost(QWEN3_8B, RTX_PRO_6000, **values)
