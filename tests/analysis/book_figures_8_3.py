"""How each figure of figures_8_3.toml is computed: id → a call of public functions, in the figure's own unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mini_engine.analysis import (
    BOOK_STEP,
    GB,
    KDA_SNAPSHOT_BYTES,
    QWEN3_8B,
    RTX_PRO_6000,
    GiB,
    KeptPrefix,
    MiB,
    append_turn,
    forward_flops,
    get_link,
    group_kv_bytes,
    kept_prefix,
    kv_bytes,
    long_lived_share,
    max_requests,
    paged_slots,
    pool_blocks,
    prefix_branches,
    recomputed_tokens,
    reserved_slots,
    saved_by_a_longer_prefix,
    shared_slots,
    table_entries,
    tokens_computed,
    unused_slots,
)
from mini_engine.config import SchedulerConfig
from mini_engine.simulator import simulate
from mini_engine.simulator.twelve_rounds import ROUND_PROMPTS, common_prefixes, twelve_rounds

LENGTHS, MAXIMUM = (9, 13, 5, 15), 16
LONG, OUTPUT, PREFIX = 8192, 256, 6144
BRANCHES = prefix_branches(4, 1536, 128)
SNAPSHOTS, MATCHED = (4096, 8192), 10_752


def prefix(tokens: int, link: str = "pcie5-x16") -> KeptPrefix:
    """A (6144 tokens) and B (2048) of 8.3.4, hit every second time."""
    return kept_prefix(str(tokens), QWEN3_8B, RTX_PRO_6000, get_link(link), tokens, 0.5)


def long_mib(requests: int, shared: int = 0) -> float:
    return group_kv_bytes(QWEN3_8B, requests, LONG, OUTPUT, shared_prefix=shared) / MiB


def tie(link: str) -> float:
    """p_A at which A is worth as much as three B."""
    probability = prefix(PREFIX, link).probability_worth(3 * prefix(2048, link).value_s)
    assert probability is not None
    return probability


def threshold(link: str) -> float:
    probability = prefix(PREFIX, link).threshold
    assert probability is not None
    return probability


@cache
def replay_hits(pool_gib: int, pressure: int = 3, gap_s: float = 0.0) -> tuple[int, ...]:
    """Hit tokens of each of the twelve rounds, by the real scheduler on the virtual clock."""
    config = SchedulerConfig(max_model_len=LONG, num_blocks=pool_blocks(QWEN3_8B, pool_gib * GiB))
    timeline = simulate(twelve_rounds(pressure, gap_s), config, BOOK_STEP)
    rounds = [record for record in timeline.requests if record.request.request_id.startswith("round")]
    return tuple(record.metrics.num_cached_tokens for record in rounds)


FIGURES_8_3: dict[str, Callable[[], float]] = {
    # 8.3.1: blocks against one stretch
    "reserve_full": lambda: reserved_slots(LENGTHS, MAXIMUM),
    "reserve_unused": lambda: reserved_slots(LENGTHS, MAXIMUM) - sum(LENGTHS),
    "used_tokens": lambda: paged_slots(LENGTHS, 4) - unused_slots(LENGTHS, 4),
    "paged_waste_p2": lambda: unused_slots(LENGTHS, 2),
    "paged_entries_p2": lambda: table_entries(LENGTHS, 2),
    "paged_waste_p4": lambda: unused_slots(LENGTHS, 4),
    "paged_entries_p4": lambda: table_entries(LENGTHS, 4),
    "paged_waste_p8": lambda: unused_slots(LENGTHS, 8),
    "paged_entries_p8": lambda: table_entries(LENGTHS, 8),
    "paged_alloc_p4": lambda: paged_slots(LENGTHS, 4),
    "paged_shared_p4": lambda: shared_slots(LENGTHS, 4, sharers=2, prefix=8),
    # 8.3.2: branches, common prefixes, preemption
    "branches_refs": lambda: BRANCHES.references,
    "branches_physical": lambda: BRANCHES.physical,
    "branches_tails": lambda: BRANCHES.tails,
    "branches_saving": lambda: BRANCHES.saved,
    "long_independent_8_mib": lambda: long_mib(8),
    "long_shared_8_mib": lambda: long_mib(8, PREFIX),
    "long_independent_16_mib": lambda: long_mib(16),
    "long_shared_16_mib": lambda: long_mib(16, PREFIX),
    "long_independent_32_mib": lambda: long_mib(32),
    "long_shared_32_mib": lambda: long_mib(32, PREFIX),
    "shared_16_gib": lambda: long_mib(16, PREFIX) / 1024,
    "fit_long_shared": lambda: max_requests(QWEN3_8B, 12 * GiB, LONG, OUTPUT, shared_prefix=PREFIX),
    "preempt_extra": lambda: tokens_computed(1536, 270),
    "blocks_1gib": lambda: pool_blocks(QWEN3_8B, GiB),
    "blocks_2gib": lambda: pool_blocks(QWEN3_8B, 2 * GiB),
    "blocks_6gib": lambda: pool_blocks(QWEN3_8B, 6 * GiB),
    "prefix_block_saving": lambda: saved_by_a_longer_prefix(16),
    # 8.3.3: what of a prompt is found
    "suffix_after_hit": lambda: append_turn(PREFIX, LONG - PREFIX).computed,
    "tree_root": lambda: min(common_prefixes()[1:4]),
    "hybrid_recompute": lambda: recomputed_tokens(MATCHED, SNAPSHOTS),
    "kda_2_mib": lambda: 2 * KDA_SNAPSHOT_BYTES / MiB,
    "kda_32_mib": lambda: 32 * KDA_SNAPSHOT_BYTES / MiB,
    "v41_long_term": lambda: float(long_lived_share()),
    # 8.3.4: what a kept prefix is worth
    "prefix_gb": lambda: kv_bytes(QWEN3_8B, PREFIX) / GB,
    "prefix_tflop": lambda: forward_flops(QWEN3_8B, PREFIX, logit_rows=0) / 1e12,
    "prefill_ratio": lambda: (
        forward_flops(QWEN3_8B, PREFIX, logit_rows=0) / forward_flops(QWEN3_8B, 2048, logit_rows=0)
    ),
    "recompute_A_ms": lambda: prefix(PREFIX).recompute_s * 1e3,
    "fetch_A_ms": lambda: prefix(PREFIX).fetch_s * 1e3,
    "hit_saving_A_ms": lambda: prefix(PREFIX).hit_saving_s * 1e3,
    "value_A_ms": lambda: prefix(PREFIX).value_s * 1e3,
    "threshold_A": lambda: threshold("pcie5-x16"),
    "fetch_A_gen4_ms": lambda: prefix(PREFIX, "pcie4-x16").fetch_s * 1e3,
    "hit_saving_A_gen4_ms": lambda: prefix(PREFIX, "pcie4-x16").hit_saving_s * 1e3,
    "threshold_A_gen4": lambda: threshold("pcie4-x16"),
    "recompute_B_ms": lambda: prefix(2048).recompute_s * 1e3,
    "fetch_B_ms": lambda: prefix(2048).fetch_s * 1e3,
    "value_B_ms": lambda: prefix(2048).value_s * 1e3,
    "value_3B_ms": lambda: 3 * prefix(2048).value_s * 1e3,
    "value_per_mib_A": lambda: prefix(PREFIX).value_s_per_mib * 1e3,
    "value_per_mib_B": lambda: prefix(2048).value_s_per_mib * 1e3,
    "tie_probability_A": lambda: tie("pcie5-x16"),
    "tie_probability_A_gen4": lambda: tie("pcie4-x16"),
    "value_A_gen4_ms": lambda: prefix(PREFIX, "pcie4-x16").value_s * 1e3,
    "value_3B_gen4_ms": lambda: 3 * prefix(2048, "pcie4-x16").value_s * 1e3,
    # 8.3.4 and exercise 8-4: the twelve rounds
    "replay_tokens": lambda: sum(ROUND_PROMPTS),
    "replay_hits_6gib": lambda: sum(replay_hits(6)),
    "replay_hits_1gib": lambda: sum(replay_hits(1)),
    "replay_rest": lambda: sum(ROUND_PROMPTS) - sum(replay_hits(6)),
    "replay_common_ratio": lambda: sum(common_prefixes()) / sum(ROUND_PROMPTS),
    "replay_hit_ratio": lambda: sum(replay_hits(6)) / sum(ROUND_PROMPTS),
}
