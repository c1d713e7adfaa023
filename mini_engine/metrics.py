"""When things happened to a request, and the figures made of it (book 8.1.3).

TTFT = t_1 - t_arrival          ITL_j = t_{j+1} - t_j          T = TTFT + sum of ITL
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median


@dataclass
class RequestMetrics:
    """Time stamps in seconds of the clock the engine was given. Token times are those of the first output (n > 1)."""

    arrival: float
    scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds until the request was first scheduled."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Seconds between consecutive tokens: one fewer than there are tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed: tokens after the first over the time they took."""
        gaps = self.itl
        return len(gaps) / sum(gaps) if gaps and sum(gaps) > 0 else None

    def summary(self) -> str:
        """One line for a person: TTFT, median ITL, tokens a second."""
        if self.ttft is None:
            return "no token was produced"
        parts = [f"TTFT {self.ttft * 1e3:.0f} ms"]
        if self.itl:
            parts.append(f"ITL {median(self.itl) * 1e3:.1f} ms (median)")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        return ", ".join([*parts, f"{len(self.token_times)} tokens"])
