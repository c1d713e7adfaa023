"""The book's four requests under its three policies (8.2.2, figures 8-5 to 8-7)."""

from __future__ import annotations

from dataclasses import replace

from mini_engine.config import SchedulerConfig
from mini_engine.simulator.workloads import Request, request_list


def book_requests() -> list[Request]:
    """r0 and r1 at 0 ms, a long r2 at 20 ms, r3 at 30 ms: (arrival ms, prompt tokens, output tokens)."""
    return request_list([(0, 2048, 8), (0, 2048, 2), (20, 8192, 2), (30, 2048, 4)])


def book_policies() -> dict[str, SchedulerConfig]:
    """At most two running, a pool that never fills, no shared prefixes.

    fixed and continuous: a budget that every prompt fits in whole. chunked: at most 2048 tokens of a prompt in a step,
    at most 4096 tokens in all, decodes first.
    """
    continuous = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16_384,
        enable_prefix_caching=False,
        max_model_len=16_384,
        block_size=16,
        num_blocks=1_025,
    )
    return {
        "fixed": replace(continuous, batching="fixed"),
        "continuous": continuous,
        "chunked": replace(continuous, max_num_batched_tokens=4_096, long_prefill_token_threshold=2_048),
    }
