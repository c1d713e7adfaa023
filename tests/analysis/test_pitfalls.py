"""What the book leaves unsaid in 8.1 and 8.2, and what students get wrong there, in numbers."""

from __future__ import annotations

import pytest

from mini_engine.analysis import (
    BOOK_STEP,
    GB,
    QWEN3_8B,
    RTX_PRO_6000,
    Chunk,
    GiB,
    Ledger,
    MiB,
    Objective,
    compute_bound_batch,
    compute_bound_context,
    decode_step,
    forward_flops,
    get_link,
    group_kv_bytes,
    marginal_bandwidth,
    mbu,
    mfu,
    prefill_step,
    request_timeline,
    resident_bytes,
    round_read_bytes,
    seconds_at,
    total_seconds,
)

ROUND_MS = {1: 26.26, 4: 26.62, 16: 27.44, 64: 29.63}  # decode rounds at 2K, experiment 8-1


def test_1_the_request_alone_has_room_for_one_inserted_prefill() -> None:
    limit = Objective(total_s=7)
    alone = request_timeline(0, 0.096, 26.5e-3, 256)
    assert total_seconds(alone) == pytest.approx(6.85, abs=0.005)
    assert limit.met(request_timeline(0, 0.096, 26.5e-3, 256, [0.096]))
    assert not limit.met(request_timeline(0.1, 0.096, 26.5e-3, 256, [0.096]))


def test_2_a_mixed_round_lengthens_the_gap_less() -> None:
    mixed = BOOK_STEP.seconds([Chunk(2048), Chunk(1, 2048)])
    assert mixed * 1e3 == pytest.approx(94.8, abs=0.05)
    request = request_timeline(0.1, 0.096, 26.5e-3, 256, [mixed - 26.5e-3])
    assert total_seconds(request) == pytest.approx(7.02, abs=0.005)


def test_3_kv_that_fills_its_share_leaves_buffers_to_the_rest() -> None:
    ledger = Ledger(capacity=32 * GiB, weights=16_381_470_720, kv=12 * GiB, activations=4 * GiB, buffers=GiB)
    assert ledger.broken_by == "kv"


def test_4_three_prices_of_an_8k_prefill() -> None:
    """By the fitted step (beside a decode of r0), at MFU 0.62, and at the 0.578 of scheme A."""
    fitted = BOOK_STEP.seconds([Chunk(8192), Chunk(1, 2050)])
    bound = prefill_step(QWEN3_8B, RTX_PRO_6000, 8192)
    assert [fitted * 1e3, seconds_at(bound, mfu=0.62) * 1e3, seconds_at(bound, mfu=0.578) * 1e3] == pytest.approx(
        [376, 428, 459], abs=0.5
    )
    assert mfu(forward_flops(QWEN3_8B, 8192), fitted, RTX_PRO_6000) == pytest.approx(0.71, abs=0.005)


def test_5_a_batch_of_64_does_not_fit_the_chapters_instance() -> None:
    assert group_kv_bytes(QWEN3_8B, 64, 2048, 256) / GiB == 20.25  # 12 GiB in the chapter, 24 in the experiment
    resident = resident_bytes(QWEN3_8B, 64, 2049)
    assert resident / GB == pytest.approx(35.7, abs=0.05)
    assert not Ledger(capacity=32 * GiB, weights=resident).fits  # 35.7 GB are 33.3 GiB


def test_a_large_batch_does_not_make_decode_compute_bound() -> None:
    assert compute_bound_context(QWEN3_8B, RTX_PRO_6000) == 370
    assert compute_bound_batch(QWEN3_8B, RTX_PRO_6000, 2048) is None
    assert decode_step(QWEN3_8B, RTX_PRO_6000, 10**6, 2048).bound == "memory"


def test_utilisation_rises_although_reading_gets_no_faster() -> None:
    reads = {batch: round_read_bytes(QWEN3_8B, batch, 2048) for batch in ROUND_MS}
    utilisation = [mbu(reads[batch], ROUND_MS[batch] * 1e-3, RTX_PRO_6000) for batch in ROUND_MS]
    assert utilisation == pytest.approx([0.33, 0.34, 0.41, 0.65], abs=0.005)
    extra = marginal_bandwidth((reads[16], reads[64]), (ROUND_MS[16] * 1e-3, ROUND_MS[64] * 1e-3))
    assert extra == pytest.approx(6.6e12, rel=0.005)
    assert extra > 3 * RTX_PRO_6000.bandwidth


def test_binary_and_decimal_units() -> None:
    assert get_link("pcie5-x16").seconds(864 * MiB) * 1e3 == pytest.approx(14.16, abs=0.005)
    assert 864 * MiB / (64 * GiB) * 1e3 == pytest.approx(13.18, abs=0.005)
    assert RTX_PRO_6000.memory_bytes - 96 * GB == pytest.approx(6.6 * GB, rel=0.01)


def test_equal_chunks_do_not_cost_alike() -> None:
    """31 times the pairs, 1.32 times the work."""
    last = forward_flops(QWEN3_8B, 512, 7680, logit_rows=0)
    assert last / forward_flops(QWEN3_8B, 512, logit_rows=0) == pytest.approx(1.32, abs=0.005)
