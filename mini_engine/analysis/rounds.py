"""A schedule worked out by hand, priced: rounds in, time stamps of every token out (book 8.2.2, exercise 8-2).

Who runs when is for the reader (or the engine's scheduler) to decide; this adds up what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mini_engine.analysis.fitted import Chunk
from mini_engine.analysis.inputs import AnalysisError, not_negative, whole
from mini_engine.metrics import RequestMetrics


@dataclass(frozen=True)
class PlannedRequest:
    """A request of `prompt` tokens that arrives at `arrival_s` and wants `output` tokens."""

    arrival_s: float
    prompt: int
    output: int

    def __post_init__(self) -> None:
        not_negative(arrival_s=self.arrival_s)
        whole(1, prompt=self.prompt, output=self.output)


@dataclass(frozen=True)
class PricedRound:
    """One round on the clock: when it ran and what each request computed in it."""

    start_s: float
    seconds: float
    work: Mapping[str, Chunk]

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True)
class PricedSchedule:
    rounds: tuple[PricedRound, ...]
    requests: Mapping[str, RequestMetrics]

    @property
    def total_s(self) -> float:
        """Seconds from 0 to the end of the last round."""
        return self.rounds[-1].end_s if self.rounds else 0.0

    @property
    def longest_gap_s(self) -> float:
        """Longest gap between two tokens of the same request."""
        return max((gap for request in self.requests.values() for gap in request.itl), default=0.0)


def price_schedule(
    requests: Mapping[str, PlannedRequest],
    rounds: Sequence[Mapping[str, int]],
    seconds: Callable[[Iterable[Chunk]], float],
) -> PricedSchedule:
    """Time stamps of a schedule given as rounds of {request: new tokens}.

    A round that completes a request's prompt returns its first token, and each further round of one token another one.
    A round starts when the one before has ended and all its requests have arrived.
    seconds: price of a round, such as `BOOK_STEP.seconds`.
    Raises AnalysisError for a schedule that computes tokens which do not exist yet, or too few of them.
    """
    computed = dict.fromkeys(requests, 0)
    results = {name: RequestMetrics(arrival=plan.arrival_s) for name, plan in requests.items()}
    priced: list[PricedRound] = []
    clock = 0.0
    for number, tokens in enumerate(rounds):
        for name, new in tokens.items():
            _check(number, name, new, computed, requests)
        work = {name: Chunk(new, computed[name]) for name, new in tokens.items()}
        start = max([clock, *(requests[name].arrival_s for name in tokens)])
        priced.append(PricedRound(start, seconds(work.values()), work))
        clock = priced[-1].end_s
        for name, new in tokens.items():
            _advance(results[name], requests[name], computed[name] + new, start, clock)
            computed[name] += new
    for name, request in results.items():
        if request.finished is None:
            raise AnalysisError(
                f"the schedule leaves {name} with {len(request.token_times)} of {requests[name].output} outputs"
            )
    return PricedSchedule(tuple(priced), results)


def _check(
    number: int, name: str, new: int, computed: Mapping[str, int], requests: Mapping[str, PlannedRequest]
) -> None:
    """Raise unless `new` tokens of the request can be computed in this round."""
    if name not in requests:
        raise AnalysisError(f"round {number} runs {name!r}, which is not among {', '.join(requests)}")
    plan, done = requests[name], computed[name]
    whole(1, **{f"tokens of {name} in round {number}": new})
    last = plan.prompt + plan.output - 1
    known = plan.prompt - done if done < plan.prompt else min(1, last - done)
    if new > known:
        raise AnalysisError(
            f"round {number} computes {new} tokens of {name}, of which {known} are known and wanted: it has computed "
            f"{done} of {plan.prompt} prompt and {plan.output - 1} output tokens"
        )


def _advance(request: RequestMetrics, plan: PlannedRequest, computed: int, start: float, end: float) -> None:
    """Write what the round's end means for the request."""
    if request.scheduled is None:
        request.scheduled = start
    if computed >= plan.prompt:
        request.token_times.append(end)
    if computed == plan.prompt + plan.output - 1:
        request.finished = end


def idle_row_steps(outputs: Iterable[int]) -> int:
    """Row-steps that stand empty when a fixed batch decodes until its longest request ends (book 8.2.2)."""
    lengths = tuple(outputs)
    for length in lengths:
        whole(1, outputs=length)
    return sum(max(lengths) - length for length in lengths) if lengths else 0
