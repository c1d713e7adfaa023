"""How each figure of figures_8_1_8_2.toml is computed: id → a call of public functions, in the figure's own unit."""

from __future__ import annotations

from collections.abc import Callable

from mini_engine.analysis import (
    BOOK_STEP,
    QWEN3_8B,
    RTX_PRO_6000,
    Chunk,
    GiB,
    Ledger,
    MiB,
    PlannedRequest,
    PricedSchedule,
    causal_pairs,
    crossover_batch,
    decode_throughput,
    ffn_bytes_per_layer,
    forward_flops,
    group_kv_bytes,
    kv_bytes,
    kv_bytes_per_token,
    lora_bytes,
    max_requests,
    padding,
    price_schedule,
    read_bytes_per_token,
    repeated_read_bytes,
    request_kv_bytes,
    request_timeline,
    resident_bytes,
    tokens_computed,
    total_seconds,
    weight_bytes,
    weight_intensity,
    weight_read_bytes,
    weight_read_share,
)

SHORT, LONG, OUTPUT, PREFIX = 2048, 8192, 256, 6144
POOL = 12 * GiB
GAP_S, PREFILL_S, QUEUE_S = 26.5e-3, 0.096, 0.1
# Medians of the sixteen 512-token chunks of an 8K prompt, experiment 8-2: the first and the last.
CHUNK_MEASURED_MS = (25.3, 35.07)

REQUESTS = {
    "r0": PlannedRequest(0.0, 2048, 8),
    "r1": PlannedRequest(0.0, 2048, 2),
    "r2": PlannedRequest(0.020, 8192, 2),
    "r3": PlannedRequest(0.030, 2048, 4),
}


def fixed() -> PricedSchedule:
    """Two at a time; nobody joins before both have ended."""
    first = [{"r0": 2048, "r1": 2048}, {"r0": 1, "r1": 1}, *[{"r0": 1}] * 6]
    second = [{"r2": 8192, "r3": 2048}, {"r2": 1, "r3": 1}, *[{"r3": 1}] * 2]
    return price_schedule(REQUESTS, [*first, *second], BOOK_STEP.seconds)


def continuous() -> PricedSchedule:
    """Two at a time; r2 takes r1's row at once, and r3 that of r2."""
    rounds = [
        {"r0": 2048, "r1": 2048},
        {"r0": 1, "r1": 1},
        {"r0": 1, "r2": 8192},
        {"r0": 1, "r2": 1},
        {"r0": 1, "r3": 2048},
        *[{"r0": 1, "r3": 1}] * 3,
    ]
    return price_schedule(REQUESTS, rounds, BOOK_STEP.seconds)


def chunked() -> PricedSchedule:
    """The same with prompts cut to 2048 tokens a round, decodes first, at most 4096 tokens a round."""
    rounds = [
        {"r0": 2048, "r1": 2048},
        {"r0": 1, "r1": 1},
        *[{"r0": 1, "r2": 2048}] * 4,
        {"r0": 1, "r2": 1},
        {"r0": 1, "r3": 2048},
        *[{"r3": 1}] * 3,
    ]
    return price_schedule(REQUESTS, rounds, BOOK_STEP.seconds)


def read_gib(context: int, batch: int) -> float:
    return read_bytes_per_token(QWEN3_8B, batch, context) / GiB


def last_over_first_chunk() -> float:
    """Matrix work of the last 512-token chunk of an 8K prompt over that of the first; no LM head in a chunk."""
    return forward_flops(QWEN3_8B, 512, 7680, logit_rows=0) / forward_flops(QWEN3_8B, 512, 0, logit_rows=0)


def instance_rest() -> float:
    return Ledger(capacity=32 * GiB, weights=weight_bytes(QWEN3_8B), kv=POOL).free / GiB


FIGURES: dict[str, Callable[[], float]] = {
    # 8.1: one request's time, and what it leaves in memory
    "weights_gib": lambda: weight_bytes(QWEN3_8B) / GiB,
    "instance_rest_gib": instance_rest,
    "ttft_s": lambda: request_timeline(QUEUE_S, PREFILL_S, GAP_S, OUTPUT).token_times[0],
    "gaps_total_s": lambda: sum(request_timeline(QUEUE_S, PREFILL_S, GAP_S, OUTPUT).itl),
    "request_time_s": lambda: total_seconds(request_timeline(QUEUE_S, PREFILL_S, GAP_S, OUTPUT)),
    "request_time_one_insert_s": lambda: total_seconds(
        request_timeline(QUEUE_S, PREFILL_S, GAP_S, OUTPUT, [PREFILL_S])
    ),
    "gap_with_insert_ms": lambda: max(request_timeline(QUEUE_S, PREFILL_S, GAP_S, OUTPUT, [PREFILL_S]).itl) * 1e3,
    "kv_bytes_per_token": lambda: kv_bytes_per_token(QWEN3_8B),
    "kv_2k_mib": lambda: kv_bytes(QWEN3_8B, SHORT) / MiB,
    "kv_8k_mib": lambda: kv_bytes(QWEN3_8B, LONG) / MiB,
    "kv_long_gib": lambda: kv_bytes(QWEN3_8B, LONG) / GiB,
    "kv_16_long_gib": lambda: 16 * kv_bytes(QWEN3_8B, LONG) / GiB,
    "tokens_short": lambda: tokens_computed(SHORT, OUTPUT),
    "tokens_long": lambda: tokens_computed(LONG, OUTPUT),
    "alloc_short_mib": lambda: request_kv_bytes(QWEN3_8B, SHORT, OUTPUT) / MiB,
    "alloc_long_mib": lambda: request_kv_bytes(QWEN3_8B, LONG, OUTPUT) / MiB,
    "fit_short": lambda: max_requests(QWEN3_8B, POOL, SHORT, OUTPUT),
    "fit_long": lambda: max_requests(QWEN3_8B, POOL, LONG, OUTPUT),
    "fit_short_prefill_only": lambda: max_requests(QWEN3_8B, POOL, SHORT, 1),
    "overcommit_42_mib": lambda: group_kv_bytes(QWEN3_8B, 42, SHORT, OUTPUT) / MiB,
    "prefix_6144_mib": lambda: kv_bytes(QWEN3_8B, PREFIX) / MiB,
    "kv_suffix_mib": lambda: kv_bytes(QWEN3_8B, LONG - PREFIX) / MiB,
    "throughput_b16": lambda: decode_throughput(16, 27.44e-3),
    "throughput_b1": lambda: decode_throughput(1, 26.26e-3),
    # 8.2.1: what a batch shares
    "intensity_b1": lambda: weight_intensity(1),
    "lora_adapter_mib": lambda: lora_bytes(QWEN3_8B, 16) / MiB,
    "lora_100_gib": lambda: 100 * lora_bytes(QWEN3_8B, 16) / GiB,
    "kv_100_8k_gib": lambda: 100 * kv_bytes(QWEN3_8B, LONG) / GiB,
    "weight_read_gib": lambda: weight_read_bytes(QWEN3_8B) / GiB,
    "weight_share_b16_gib": lambda: weight_read_share(QWEN3_8B, 16) / GiB,
    "weight_share_b64_gib": lambda: weight_read_share(QWEN3_8B, 64) / GiB,
    "kv_2k_gib": lambda: kv_bytes(QWEN3_8B, SHORT) / GiB,
    "read_per_token_2048_b1_gib": lambda: read_gib(2048, 1),
    "read_per_token_2048_b4_gib": lambda: read_gib(2048, 4),
    "read_per_token_2048_b16_gib": lambda: read_gib(2048, 16),
    "read_per_token_2048_b64_gib": lambda: read_gib(2048, 64),
    "read_per_token_8192_b1_gib": lambda: read_gib(8192, 1),
    "read_per_token_8192_b4_gib": lambda: read_gib(8192, 4),
    "read_per_token_8192_b16_gib": lambda: read_gib(8192, 16),
    "read_per_token_8192_b64_gib": lambda: read_gib(8192, 64),
    "read_ratio_64": lambda: read_gib(2048, 1) / read_gib(2048, 64),
    "b_kv_2k": lambda: crossover_batch(QWEN3_8B, 2048),
    "b_kv_8k": lambda: crossover_batch(QWEN3_8B, 8192),
    "resident_64_short_gb": lambda: resident_bytes(QWEN3_8B, 64, SHORT + 1) / 1e9,
    # 8.2.2: rounds and schedules
    "weight_read_ms": lambda: weight_read_bytes(QWEN3_8B) / RTX_PRO_6000.bandwidth * 1e3,
    "step_decode_ms": lambda: BOOK_STEP.seconds([Chunk(1, 2048)]) * 1e3,
    "step_prefill_ms": lambda: BOOK_STEP.seconds([Chunk(2048)]) * 1e3,
    "first_round_ms": lambda: continuous().rounds[0].seconds * 1e3,
    "second_round_ms": lambda: continuous().rounds[1].seconds * 1e3,
    "fixed_total_ms": lambda: fixed().total_s * 1e3,
    "fixed_max_gap_ms": lambda: fixed().longest_gap_s * 1e3,
    "continuous_total_ms": lambda: continuous().total_s * 1e3,
    "continuous_max_gap_ms": lambda: continuous().longest_gap_s * 1e3,
    "chunked_total_ms": lambda: chunked().total_s * 1e3,
    "chunked_max_gap_ms": lambda: chunked().longest_gap_s * 1e3,
    "total_saved_continuous": lambda: 1 - continuous().total_s / fixed().total_s,
    "gap_growth_continuous": lambda: continuous().longest_gap_s / fixed().longest_gap_s,
    # 8.2.3 and 8.2.4: chunks and shapes
    "pairs_first_chunk": lambda: causal_pairs(512),
    "pairs_last_chunk": lambda: causal_pairs(512, 7680),
    "pairs_ratio": lambda: causal_pairs(512, 7680) / causal_pairs(512),
    "pairs_4_0": lambda: causal_pairs(4),
    "pairs_4_8": lambda: causal_pairs(4, 8),
    "chunk_matrix_growth": lambda: last_over_first_chunk() - 1,
    "chunk_slowdown": lambda: CHUNK_MEASURED_MS[1] / CHUNK_MEASURED_MS[0],
    "ffn_layer_mib": lambda: ffn_bytes_per_layer(QWEN3_8B) / MiB,
    "ffn_two_chunks_mib": lambda: repeated_read_bytes(ffn_bytes_per_layer(QWEN3_8B), 256, 128) / MiB,
    "graph_padding_17": lambda: padding(17, (16, 32)),
}
