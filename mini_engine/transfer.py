"""Moving blocks over a link, in virtual time: how long it takes, and when one transfer waits for another."""

from __future__ import annotations

from dataclasses import dataclass

from mini_engine.errors import ConfigError


@dataclass(frozen=True)
class TransferLink:
    """bytes_per_s: in one direction. latency_s: added to every transfer, whatever its size."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise ConfigError(
                f"a link needs more than 0 bytes a second and a latency of at least 0 s, got {self.bytes_per_s} and "
                f"{self.latency_s} s"
            )

    def seconds(self, num_bytes: int) -> float:
        """One transfer alone."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Lane:
    """One direction of a link: one transfer at a time, in the order they are started."""

    def __init__(self, link: TransferLink):
        self.link = link
        self.free_at = 0.0
        self.busy_s = 0.0

    def quote(self, now: float, num_bytes: int) -> float:
        """Seconds from `now` until a transfer started now has landed: those before it, then its own."""
        return max(0.0, self.free_at - now) + self.link.seconds(num_bytes)

    def start(self, now: float, num_bytes: int, slowdown: float = 1.0) -> float:
        """Start a transfer; returns the time at which it lands. slowdown: its own seconds are multiplied by it."""
        seconds = self.link.seconds(num_bytes) * slowdown
        self.free_at = max(self.free_at, now) + seconds
        self.busy_s += seconds
        return self.free_at
