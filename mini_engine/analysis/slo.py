"""Service objectives: deadlines on what a request's time stamps say (book 8.1.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mini_engine.analysis.inputs import positive
from mini_engine.analysis.timeline import longest_gap, total_seconds
from mini_engine.metrics import RequestMetrics


@dataclass(frozen=True)
class Objective:
    """Longest allowed seconds of each; None sets no limit. A limit that is met exactly is met.

    ttft_s: arrival to first token. gap_s: the longest gap between tokens. total_s: arrival to last token.
    """

    ttft_s: float | None = None
    gap_s: float | None = None
    total_s: float | None = None

    def __post_init__(self) -> None:
        limits = {"ttft_s": self.ttft_s, "gap_s": self.gap_s, "total_s": self.total_s}
        positive(**{name: limit for name, limit in limits.items() if limit is not None})

    def broken_by(self, request: RequestMetrics) -> tuple[str, ...]:
        """The limits the request broke, of "ttft", "gap", "total"; one without tokens breaks all that are set."""
        answered = bool(request.token_times)
        checks = {
            "ttft": (self.ttft_s, request.ttft if answered else None),
            "gap": (self.gap_s, longest_gap(request) if answered else None),
            "total": (self.total_s, total_seconds(request) if answered else None),
        }
        return tuple(
            name for name, (limit, value) in checks.items() if limit is not None and (value is None or value > limit)
        )

    def met(self, request: RequestMetrics) -> bool:
        return not self.broken_by(request)


def attainment(requests: Iterable[RequestMetrics], objective: Objective) -> float:
    """Share of the requests that met the objective; 1 for none."""
    met = [objective.met(request) for request in requests]
    return sum(met) / len(met) if met else 1.0


def goodput(requests: Iterable[RequestMetrics], objective: Objective, window_s: float) -> float:
    """Requests a second that met the objective. Says nothing on whether their answers were right.

    A request's clock starts at its `arrival`: take the planned arrival, not the moment a busy client got round to
    submitting it, or waiting in the client's own queue goes unseen.
    """
    positive(window_s=window_s)
    return sum(objective.met(request) for request in requests) / window_s
