"""The life of one request as time stamps: queue, prefill, gaps (book 8.1.1, 8.1.3).

The result is the engine's own `RequestMetrics`, so that what is worked out here, simulated or measured reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_engine.analysis.inputs import AnalysisError, not_negative, positive, whole
from mini_engine.metrics import RequestMetrics


def request_timeline(
    queue_s: float, prefill_s: float, gap_s: float, outputs: int, inserted_s: Sequence[float] = ()
) -> RequestMetrics:
    """A request that arrives at 0 and returns its tokens at an even pace.

    outputs: tokens in all; n of them have n − 1 gaps between them.
    inserted_s: foreign rounds that come between two of its tokens, each in a gap of its own, from the first gap on.

    Source: book 8.1.1, 0.1 + 0.096 + 255 · 0.0265 = 6.95 s. Two things go without saying there. The 0.1 s of queueing
    is assumed: the request alone takes 6.85 s, and with one inserted prefill it would still be done in 7. And the
    insert is a prefill round of its own (a gap of 26.5 + 96 = 123 ms); in a mixed round as in 8.2.2, which computes
    the prefill and the decode together, the gap would be 94.8 ms and the total 7.02 s.
    """
    not_negative(queue_s=queue_s, prefill_s=prefill_s, gap_s=gap_s)
    whole(1, outputs=outputs)
    if len(inserted_s) > outputs - 1:
        raise AnalysisError(f"{outputs} outputs have {outputs - 1} gaps, too few for {len(inserted_s)} inserted rounds")
    clock = queue_s + prefill_s
    times = [clock]
    for index in range(outputs - 1):
        extra = inserted_s[index] if index < len(inserted_s) else 0.0
        not_negative(inserted_s=extra)
        clock += gap_s + extra
        times.append(clock)
    return RequestMetrics(arrival=0.0, scheduled=queue_s, token_times=times, finished=clock)


def total_seconds(request: RequestMetrics) -> float:
    """Arrival to last token: T = TTFT + sum of ITL. Raises AnalysisError for a request without tokens."""
    if not request.token_times:
        raise AnalysisError("the request has produced no token: it has no total time yet")
    return request.token_times[-1] - request.arrival


def longest_gap(request: RequestMetrics) -> float:
    """Longest time between two tokens in seconds; 0 with fewer than two.

    The maximum, not a percentile: in the six-request replay of experiment 8-2 the budget of 8192 has the better median
    and p95 (12.7 and 22.8 ms against 12.9 and 27.5) although one of its gaps is 183 ms long, and 32 at a budget of 512.
    """
    return max(request.itl, default=0.0)


def decode_throughput(batch: int, round_s: float) -> float:
    """Output tokens a second while `batch` requests decode in rounds of `round_s` seconds.

    Decode alone: 583 for 16 requests of the book's sweep, where the whole run with its prefill reaches 479. Say which.
    """
    whole(0, batch=batch)
    positive(round_s=round_s)
    return batch / round_s


def batch_fill_wait(batch: int, arrivals_per_s: float) -> tuple[float, float]:
    """(mean, longest) seconds that requests wait for a batch to fill, at an even rate of arrival; it adds to the TTFT.

    The first of b requests waits for b − 1 more to come, the last for none. The sweep of book 8.2.1 has no such wait:
    all requests of a batch come at once.
    """
    whole(1, batch=batch)
    positive(arrivals_per_s=arrivals_per_s)
    longest = (batch - 1) / arrivals_per_s
    return longest / 2, longest
