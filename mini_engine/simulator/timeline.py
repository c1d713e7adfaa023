"""What a simulated run leaves behind: every round, and every request with its times.

The times of a request are the engine's own `RequestMetrics`, so TTFT and ITL mean here what they mean there. All
times are seconds on the virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mini_engine.analysis import Objective, goodput
from mini_engine.config import SchedulerConfig
from mini_engine.metrics import RequestMetrics
from mini_engine.scheduler import SchedulerStats
from mini_engine.simulator.cost import StepWork
from mini_engine.simulator.workloads import Request


class Chunk(NamedTuple):
    """A request's part of a round: its tokens `start` to `start + num_tokens - 1`."""

    request: int
    start: int
    num_tokens: int


class Round(NamedTuple):
    """One step of the scheduler: when, what, and the state while it ran.

    used_blocks: blocks that some sequence references. chunks: empty unless the run kept them.
    """

    start: float
    end: float
    work: StepWork
    num_running: int
    num_waiting: int
    num_preempted: int
    used_blocks: int
    chunks: tuple[Chunk, ...] = ()


@dataclass(slots=True)
class RequestRecord:
    """A request and what happened to it. index: its place in `Timeline.requests`."""

    index: int
    request: Request
    metrics: RequestMetrics


@dataclass
class Timeline:
    """The result of a run. requests: in the order of the workload."""

    config: SchedulerConfig
    requests: list[RequestRecord]
    rounds: list[Round] = field(default_factory=list)
    stats: SchedulerStats = field(default_factory=SchedulerStats)

    @property
    def start(self) -> float:
        """The first arrival."""
        return min((record.request.arrival for record in self.requests), default=0.0)

    @property
    def end(self) -> float:
        """The end of the last round."""
        return self.rounds[-1].end if self.rounds else self.start

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the end of the last round."""
        return self.end - self.start

    @cached_property
    def ttfts(self) -> np.ndarray:
        """Seconds to the first token, one for each request that got one."""
        return np.array([t for record in self.requests if (t := record.metrics.ttft) is not None], dtype=float)

    @cached_property
    def queue_times(self) -> np.ndarray:
        """Seconds from arrival to first being scheduled."""
        return np.array([t for record in self.requests if (t := record.metrics.queue_time) is not None], dtype=float)

    @cached_property
    def itls(self) -> np.ndarray:
        """All gaps between output tokens in seconds, request after request."""
        gaps = [np.diff(np.array(record.metrics.token_times, dtype=float)) for record in self.requests]
        return np.concatenate(gaps) if gaps else np.empty(0)

    @property
    def longest_gap(self) -> float:
        """The longest ITL of any request in seconds; 0 where no request had two tokens."""
        return float(self.itls.max()) if self.itls.size else 0.0

    @property
    def num_output_tokens(self) -> int:
        return sum(len(record.metrics.token_times) for record in self.requests)

    def num_good(self, objective: Objective) -> int:
        """Requests that met every deadline of the objective."""
        return sum(objective.met(record.metrics) for record in self.requests)

    def goodput(self, objective: Objective) -> float:
        """Requests a second that met the objective, from the first arrival to the end of the last round."""
        if self.duration <= 0:
            return 0.0
        return goodput((record.metrics for record in self.requests), objective, self.duration)


def percentiles(values: np.ndarray | Sequence[float], levels: Sequence[float] = (50, 90, 95, 99)) -> dict[str, float]:
    """{"p50": …, "max": …}, linear between samples. Of 16 samples p95 is all but the maximum: mind the number."""
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        return {}
    found = np.percentile(array, levels)
    return {f"p{level:g}": float(value) for level, value in zip(levels, found, strict=True)} | {
        "max": float(array.max())
    }
