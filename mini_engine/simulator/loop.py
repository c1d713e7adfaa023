"""The real scheduler under a virtual clock.

    arrivals up to now → Scheduler.schedule → clock += cost(step) → Scheduler.update

Nothing here decides anything: which tokens a step computes comes from the same `Scheduler` and `BlockManager` that
drive the model, how long it takes from the cost model. The cost of a step here depends on what is running and waiting,
not on how many requests have come and gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from mini_engine.analysis import FittedStep
from mini_engine.config import SchedulerConfig
from mini_engine.errors import ConfigError, RequestError
from mini_engine.metrics import RequestMetrics
from mini_engine.scheduler import Scheduler, SchedulerOutput
from mini_engine.sequence import Sequence
from mini_engine.simulator.cost import CostModel, StepWork, fitted_cost
from mini_engine.simulator.replay import UNKNOWN_TOKEN, ReplaySequence
from mini_engine.simulator.timeline import Chunk, RequestRecord, Round, Timeline
from mini_engine.simulator.workloads import Request


class Simulator:
    """One run of one workload. `now` is the virtual clock in seconds.

    cost: seconds of a step, or a fitted step such as `analysis.BOOK_STEP`.
    keep_chunks: note in every round which tokens of which request it computed. The Gantt chart needs it; a trace of
    thousands of requests has millions of them.

    Raises RequestError, naming the request, for one that the scheduler could never serve; then nothing ran.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        config: SchedulerConfig,
        cost: CostModel | FittedStep,
        *,
        keep_chunks: bool = True,
    ):
        self.scheduler = Scheduler(config)
        self.cost = fitted_cost(cost) if isinstance(cost, FittedStep) else cost
        self.keep_chunks = keep_chunks
        self.now = 0.0
        records = [
            RequestRecord(i, request, RequestMetrics(arrival=request.arrival)) for i, request in enumerate(requests)
        ]
        self.timeline = Timeline(config, records, stats=self.scheduler.stats)
        self._pending = deque(sorted(records, key=lambda record: record.request.arrival))
        self._alive: dict[Sequence, RequestRecord] = {}
        self._never_scheduled: set[Sequence] = set()
        for record in records:
            try:
                self.scheduler.validate(ReplaySequence(record.request, record.index))
            except RequestError as error:
                raise type(error)(f"request {record.index} ({record.request.request_id}): {error}") from None

    def run(self) -> Timeline:
        """Run to the end."""
        while self.has_unfinished():
            self.step()
        return self.timeline

    def has_unfinished(self) -> bool:
        return bool(self._pending) or self.scheduler.has_unfinished()

    def step(self) -> Round:
        """One round: let in what has arrived by now (or wait for the next arrival), schedule, and move the clock."""
        if self._pending and not self.scheduler.has_unfinished():
            self.now = max(self.now, self._pending[0].request.arrival)
        self._let_in()
        output = self.scheduler.schedule()
        if not output.scheduled:
            raise RuntimeError(
                f"the scheduler chose nothing at {self.now} s, with {self.scheduler.num_waiting} waiting"
            )
        work = StepWork.of(output)
        seconds = self.cost(work)
        if not 0 <= seconds < math.inf:
            raise ConfigError(
                f"the cost model gave {seconds} s for {work}: a step takes finite time, and not less than 0"
            )
        start, self.now = self.now, self.now + seconds
        round_ = self._note_round(output, work, start)
        self._take_tokens(output)
        return round_

    def _let_in(self) -> None:
        while self._pending and self._pending[0].request.arrival <= self.now:
            record = self._pending.popleft()
            seq = ReplaySequence(record.request, record.index)
            self._alive[seq] = record
            self._never_scheduled.add(seq)
            self.scheduler.add(seq)

    def _note_round(self, output: SchedulerOutput, work: StepWork, start: float) -> Round:
        if self._never_scheduled:
            for seq in self._never_scheduled.intersection([item.seq for item in output.scheduled]):
                self._alive[seq].metrics.scheduled = start
                self._never_scheduled.remove(seq)
        chunks: tuple[Chunk, ...] = ()
        if self.keep_chunks:
            chunks = tuple(Chunk(self._alive[seq].index, first, count) for seq, first, count in output.scheduled)
        blocks = self.scheduler.blocks
        round_ = Round(
            start,
            self.now,
            work,
            len(self.scheduler.running),
            self.scheduler.num_waiting,
            len(output.preempted),
            blocks.num_usable_blocks - blocks.num_free_blocks,
            chunks,
        )
        self.timeline.rounds.append(round_)
        return round_

    def _take_tokens(self, output: SchedulerOutput) -> None:
        alive, now = self._alive, self.now
        for seq, _ in output.sampled:
            alive[seq].metrics.token_times.append(now)
        for seq in self.scheduler.update(output, [UNKNOWN_TOKEN] * len(output.sampled)):
            metrics = alive.pop(seq).metrics
            metrics.finished = now
            metrics.num_cached_tokens = seq.num_cached_tokens
            metrics.num_preemptions = seq.num_preemptions


def simulate(
    requests: Iterable[Request], config: SchedulerConfig, cost: CostModel | FittedStep, *, keep_chunks: bool = True
) -> Timeline:
    """Run a workload to its end. See Simulator for the arguments and what is raised."""
    return Simulator(requests, config, cost, keep_chunks=keep_chunks).run()
