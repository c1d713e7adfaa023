"""What several simulator tests share: a small configuration, and an oracle that knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mini_engine.config import SchedulerConfig
from mini_engine.simulator.workloads import Request


def config(**overrides: Any) -> SchedulerConfig:
    """Nothing in short supply unless it is named."""
    roomy: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 100_000,
        "max_model_len": 20_000,
        "block_size": 16,
        "num_blocks": 1_000,
        "enable_prefix_caching": False,
    }
    return SchedulerConfig(**{**roomy, **overrides})


def by_hand(
    requests: list[Request], seats: int, fixed: bool, seconds: Callable[[int, int], float]
) -> list[list[float]]:
    """Token times of each request under whole-prompt batching, from nothing but the book's description.

    Continuous: a free seat is taken at the next round. Fixed: a batch is taken when the last one has ended.
    seconds(tokens, pairs): of a round.
    """
    order = sorted(range(len(requests)), key=lambda i: requests[i].arrival)
    times: list[list[float]] = [[] for _ in requests]
    running: list[int] = []
    now = 0.0
    while order or running:
        if not running:
            now = max(now, requests[order[0]].arrival)
        if not fixed or not running:
            while order and len(running) < seats and requests[order[0]].arrival <= now:
                running.append(order.pop(0))
        tokens = pairs = 0
        for i in running:
            length = requests[i].num_prompt_tokens + len(times[i])
            new = 1 if times[i] else length
            tokens += new
            pairs += sum(range(length - new + 1, length + 1))
        now += seconds(tokens, pairs)
        for i in running:
            times[i].append(now)
        running = [i for i in running if len(times[i]) < requests[i].num_output_tokens]
    return times
