"""The book's arithmetic as small pure functions: units in names or docstrings, the book's section as source.

Flat on purpose: `from mini_engine.analysis import QWEN3_8B, GiB, read_bytes_per_token`. Never imports torch; numpy only
where a fit is asked for. Times are seconds, memory is bytes, rates are per second, unless a name says otherwise.

    units, formats, hardware, models    what there is: numbers, cards, shapes
    memory, capacity, shards, instance  what fits                                  8.1.2
    flops, traffic, roofline, step      what a round computes and reads            8.2.1
    lora                                adapters in a batch                        8.2.1
    fitted, rounds, chunks, graphs      what a round takes, and schedules of them  8.2.2 to 8.2.4
    timeline, slo                       what a user notices of it                  8.1.1, 8.1.3
"""

from mini_engine.analysis.capacity import (
    block_bytes,
    blocks_needed,
    group_blocks,
    group_kv_bytes,
    max_requests,
    pool_blocks,
    request_kv_bytes,
    shared_blocks,
    tokens_computed,
)
from mini_engine.analysis.chunks import largest_chunk, repeated_read_bytes, split_prompt
from mini_engine.analysis.fitted import BOOK_STEP, Chunk, FittedStep, fit_step
from mini_engine.analysis.flops import (
    causal_pairs,
    decode_flops,
    flops_per_pair,
    forward_flops,
    linear_flops_per_token,
    lm_head_flops,
)
from mini_engine.analysis.formats import (
    BF16,
    FORMATS,
    FP8,
    FP16,
    FP32,
    Q4_0,
    Q4_1,
    Q8_0,
    NumberFormat,
    get_format,
)
from mini_engine.analysis.graphs import capture_break_even, padded_rows, padding, staircase
from mini_engine.analysis.hardware import (
    RTX_PRO_6000,
    Hardware,
    Link,
    get_hardware,
    get_link,
    hardware_names,
    link_names,
)
from mini_engine.analysis.inputs import AnalysisError
from mini_engine.analysis.instance import Instance, Ledger
from mini_engine.analysis.lora import (
    lora_bytes,
    lora_intensity,
    lora_read_bytes,
    requests_beside_adapters,
    rows_per_adapter,
)
from mini_engine.analysis.memory import (
    ffn_bytes_per_layer,
    kv_bytes,
    kv_bytes_per_token,
    resident_bytes,
    weight_bytes,
    weight_read_bytes,
)
from mini_engine.analysis.models import QWEN3_8B, get_model, model_names
from mini_engine.analysis.roofline import (
    attainable_flops,
    decode_intensity,
    marginal_bandwidth,
    mbu,
    mfu,
    ridge_point,
    weight_intensity,
)
from mini_engine.analysis.rounds import (
    PlannedRequest,
    PricedRound,
    PricedSchedule,
    idle_row_steps,
    price_schedule,
)
from mini_engine.analysis.shards import kv_bytes_per_token_per_card, kv_heads_per_card, weight_bytes_per_card
from mini_engine.analysis.slo import Objective, attainment, goodput
from mini_engine.analysis.step import (
    StepTime,
    compute_bound_batch,
    compute_bound_context,
    decode_step,
    prefill_step,
    seconds_at,
)
from mini_engine.analysis.timeline import (
    batch_fill_wait,
    decode_throughput,
    longest_gap,
    request_timeline,
    total_seconds,
)
from mini_engine.analysis.traffic import (
    crossover_batch,
    read_bytes_per_token,
    round_read_bytes,
    separate_store_gain,
    separate_store_read_bytes_per_token,
    weight_read_share,
)
from mini_engine.analysis.units import GB, TB, GiB, KiB, MiB

__all__ = [
    "AnalysisError",
    "BF16",
    "BOOK_STEP",
    "Chunk",
    "FORMATS",
    "FP16",
    "FP32",
    "FP8",
    "FittedStep",
    "GB",
    "GiB",
    "Hardware",
    "Instance",
    "KiB",
    "Ledger",
    "Link",
    "MiB",
    "NumberFormat",
    "Objective",
    "PlannedRequest",
    "PricedRound",
    "PricedSchedule",
    "Q4_0",
    "Q4_1",
    "Q8_0",
    "QWEN3_8B",
    "RTX_PRO_6000",
    "StepTime",
    "TB",
    "attainable_flops",
    "attainment",
    "batch_fill_wait",
    "block_bytes",
    "blocks_needed",
    "capture_break_even",
    "causal_pairs",
    "compute_bound_batch",
    "compute_bound_context",
    "crossover_batch",
    "decode_flops",
    "decode_intensity",
    "decode_step",
    "decode_throughput",
    "ffn_bytes_per_layer",
    "fit_step",
    "flops_per_pair",
    "forward_flops",
    "get_format",
    "get_hardware",
    "get_link",
    "get_model",
    "goodput",
    "group_blocks",
    "group_kv_bytes",
    "hardware_names",
    "idle_row_steps",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_bytes_per_token_per_card",
    "kv_heads_per_card",
    "largest_chunk",
    "linear_flops_per_token",
    "link_names",
    "lm_head_flops",
    "longest_gap",
    "lora_bytes",
    "lora_intensity",
    "lora_read_bytes",
    "marginal_bandwidth",
    "max_requests",
    "mbu",
    "mfu",
    "model_names",
    "padded_rows",
    "padding",
    "pool_blocks",
    "prefill_step",
    "price_schedule",
    "read_bytes_per_token",
    "repeated_read_bytes",
    "request_kv_bytes",
    "request_timeline",
    "requests_beside_adapters",
    "resident_bytes",
    "ridge_point",
    "round_read_bytes",
    "rows_per_adapter",
    "seconds_at",
    "separate_store_gain",
    "separate_store_read_bytes_per_token",
    "shared_blocks",
    "split_prompt",
    "staircase",
    "tokens_computed",
    "total_seconds",
    "weight_bytes",
    "weight_bytes_per_card",
    "weight_intensity",
    "weight_read_bytes",
    "weight_read_share",
]
