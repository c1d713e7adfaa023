"""The posts' figure in simulation: an agent trace at fixed concurrency on eight B200, TP against TP + DCP.

The real scheduler runs; only the time of a step comes from arithmetic (`dcp_cost.py`).

`tokens/s/GPU` is not defined in the post. By Little's law its 6,091 at 512 requests mean 4 s a request if output alone
counts, 75 s if a tenth of the input is new and counts, 708 s with all input. So all three readings are given here.
Absolute values are not to be compared: rows, ratios and shapes are (`dcp_post.py`).

Every assumed constant is a field of `Cluster` or an argument of `agent_trace`. Chosen by looking at the post's table,
and said so: KV in FP8 (with BF16 the TP pool is full at 16); `open_sessions` (KV use of DCP); and `lower_tier`, with
which prefixes outlive the pool and both runs compute the same tokens. Without it TP's small pool forgets what it will
need, computes most prompts anew, and falls further behind than the post's factor of 1.3 at 16 requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mini_engine.config import SchedulerConfig
from mini_engine.errors import RequestError
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence as EngineSequence
from mini_engine.simulator.dcp_cost import Cluster, StepLoad
from mini_engine.simulator.dcp_trace import BINS, BLOCK_SIZE, OPEN_SESSIONS, new_tokens
from mini_engine.simulator.replay import UNKNOWN_TOKEN, ReplaySequence
from mini_engine.simulator.workloads import Request

LONGEST = 2_000_000


@dataclass(slots=True)
class Served:
    """A request and its times in seconds. prompt, new, output, cached: tokens.

    share: the part of its life, from arrival to end, that fell into the time that is measured.
    """

    prompt: int
    new: int
    output: int
    arrived: float
    first_token: float = 0.0
    finished: float = 0.0
    cached: int = 0
    share: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Speed its user sees, after the first token."""
        return (self.output - 1) / (self.finished - self.first_token)


@dataclass(frozen=True)
class Load:
    """One concurrency, while it was held: from when half as many requests had finished until the trace ran out.

    kv_share, kv_peak: of the pool's blocks, in use by some request, on average over time and at most. running: of the
    requests in flight, how many had KV; the rest waited.
    """

    cluster: Cluster
    concurrency: int
    served: list[Served]
    seconds: float
    kv_share: float
    kv_peak: float
    running: float

    def tokens_per_s_per_gpu(self, reading: str = "new") -> float:
        """reading: "output" alone, output and "new" input tokens, or "all" tokens."""
        count = sum(s.share * (s.output + {"output": 0, "new": s.new, "all": s.prompt}[reading]) for s in self.served)
        return count / self.seconds / self.cluster.ranks

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, those found in the pool itself."""
        return sum(s.cached for s in self.served) / sum(s.prompt for s in self.served)

    @property
    def tokens_per_s_per_user(self) -> float:
        """Mean over requests of more than one token."""
        speeds = [s.tokens_per_s for s in self.served if s.output > 1]
        return sum(speeds) / len(speeds)

    def bins(self) -> list[Load | None]:
        """The same for each band of prompt + output of `BINS`; None where the trace had nothing of it."""
        bands = [[s for s in self.served if low <= s.prompt + s.output < high] for low, high in BINS]
        return [replace(self, served=band) if band else None for band in bands]


@dataclass
class _Window:
    """What is measured, and from when to when. kv, running: summed over its seconds."""

    began: float = -1.0
    ended: float = -1.0
    kv: float = 0.0
    kv_peak: float = 0.0
    running: float = 0.0

    def note(self, start: float, end: float, scheduler: Scheduler) -> None:
        self.began = start if self.began < 0 else self.began
        self.ended = end
        share = 1 - scheduler.blocks.num_free_blocks / scheduler.blocks.num_usable_blocks
        self.kv += (end - start) * share
        self.kv_peak = max(self.kv_peak, share)
        self.running += (end - start) * len(scheduler.running)

    def share_of(self, served: Served) -> float:
        inside = min(self.ended, served.finished) - max(self.began, served.arrived)
        return max(inside, 0.0) / (served.finished - served.arrived)


@dataclass
class _Client:
    """Keeps `concurrency` requests in flight: as one ends, the next line of the trace arrives."""

    lines: deque[tuple[Request, int]]
    concurrency: int
    alive: dict[EngineSequence, Served] = field(default_factory=dict)
    known: dict[EngineSequence, int] = field(default_factory=dict)
    ended: list[Served] = field(default_factory=list)

    def send(self, now: float, scheduler: Scheduler, lower_tier: bool) -> None:
        while self.lines and len(self.alive) < self.concurrency:
            request, new = self.lines.popleft()
            prompt, output = request.num_prompt_tokens, request.num_output_tokens
            seq = ReplaySequence(request, len(self.alive) + len(self.ended))
            self.known[seq] = prompt - new if lower_tier else 0
            self.alive[seq] = Served(prompt, new, output, now)
            scheduler.add(seq)

    def end(self, seq: EngineSequence, now: float) -> None:
        del self.known[seq]
        served = self.alive.pop(seq)
        served.finished, served.cached = now, seq.num_cached_tokens
        self.ended.append(served)


def replay(requests: Sequence[Request], cluster: Cluster, concurrency: int, seen: int = OPEN_SESSIONS) -> Load:
    """Replay a trace with `concurrency` requests in flight.

    seen: that many lines at the front only tell what has been seen before. Blocks of 512 tokens of context in both
    cases (64 a rank where the context is cut 8 ways), so that grain is no difference.
    Raises RequestError for a trace too short to hold the concurrency, and for a request that could never fit.
    """
    if len(requests) - seen < 2 * concurrency:
        raise RequestError(
            f"{max(len(requests) - seen, 0)} lines after the {seen} seen before are too few to hold {concurrency} "
            f"requests in flight: at least {2 * concurrency} are needed, and many more for steady figures"
        )
    config = SchedulerConfig(
        max_num_seqs=concurrency,
        max_num_batched_tokens=LONGEST if cluster.lower_tier else cluster.tokens_per_step,
        max_model_len=LONGEST,
        num_blocks=cluster.num_kv_tokens // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
    )
    scheduler, window, now = Scheduler(config), _Window(), 0.0
    client = _Client(deque(list(zip(requests, new_tokens(requests), strict=True))[seen:]), concurrency)
    while client.lines or scheduler.has_unfinished():
        client.send(now, scheduler, cluster.lower_tier)
        holds = bool(client.lines) and len(client.ended) >= concurrency // 2
        output = scheduler.schedule()
        start, now = now, now + cluster.seconds(StepLoad.of(output, client.known))
        if holds:
            window.note(start, now, scheduler)
        for seq, _ in output.sampled:
            client.alive[seq].first_token = client.alive[seq].first_token or now
        for seq in scheduler.update(output, [UNKNOWN_TOKEN] * len(output.sampled)):
            client.end(seq, now)
    for served in client.ended:
        served.share = window.share_of(served)
    measured = [served for served in client.ended if served.share > 0]
    seconds = window.ended - window.began
    kv, running = window.kv / seconds, window.running / seconds
    return Load(cluster, concurrency, measured, seconds, kv, window.kv_peak, running)


def sweep(requests: Sequence[Request], cluster: Cluster, concurrencies: Iterable[int]) -> list[Load]:
    """The whole trace at each concurrency, every time on a fresh pool."""
    return [replay(requests, cluster, concurrency) for concurrency in concurrencies]
