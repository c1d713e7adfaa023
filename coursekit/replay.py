"""A workload played against the real engine, on this machine's clock: the measured twin of `mini_engine.simulator`.

    measured = replay(engine, requests, config)      the arguments of simulate(requests, config, cost), and its result
    fit_run(measured_steps(measured))                the price of a round on this machine

Prompts are made up of token ids, since only lengths matter here. Requests arrive when they were planned to, whether or
not the engine is free to notice: it looks for new ones between two rounds only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from tqdm.auto import tqdm

from mini_engine import LLMEngine, SamplingParams
from mini_engine.batch import logits_rows
from mini_engine.config import SchedulerConfig
from mini_engine.metrics import RequestMetrics
from mini_engine.sampler import sample
from mini_engine.scheduler import Scheduler, SchedulerOutput
from mini_engine.sequence import Sequence as EngineSequence
from mini_engine.simulator import MeasuredStep, Request, Timeline
from mini_engine.simulator.cost import StepWork
from mini_engine.simulator.timeline import Chunk, RequestRecord, Round


def replay(engine: LLMEngine, requests: Sequence[Request], config: SchedulerConfig, desc: str = "replay") -> Timeline:
    """Run the requests to their end; times in seconds since the start, a request's `arrival` is the planned one.

    config: how to schedule; the engine's pool must have as many blocks, of this size. The engine gets a new scheduler.
    Raises RequestError for a request that could never be served, ValueError where the pool differs.
    """
    pool = (engine.runner.num_blocks, engine.runner.block_size)
    if (config.num_blocks, config.block_size) != pool:
        raise ValueError(
            f"config has {config.num_blocks} blocks of {config.block_size}, the engine {pool[0]} of {pool[1]}"
        )
    engine.scheduler = Scheduler(config)
    records = [RequestRecord(i, request, RequestMetrics(request.arrival)) for i, request in enumerate(requests)]
    of = {_sequence(engine, record): record for record in records}
    for seq in of:
        engine.scheduler.validate(seq)
    return _Run(engine, Timeline(config, records, stats=engine.scheduler.stats), of).to_the_end(desc)


def measured_steps(*timelines: Timeline) -> list[MeasuredStep]:
    """Work and seconds of every round."""
    return [
        MeasuredStep(round_.work.num_tokens, round_.work.num_pairs, round_.end - round_.start)
        for timeline in timelines
        for round_ in timeline.rounds
    ]


def noticed(timeline: Timeline) -> list[float]:
    """When the engine could first know of each request: the start of the first round after its arrival.

    A queueing time counted from here leaves out the wait for the round that was running when the request came.
    """
    starts = [round_.start for round_ in timeline.rounds]
    return [
        min((start for start in starts if start >= record.request.arrival), default=timeline.end)
        for record in timeline.requests
    ]


class _Run:
    def __init__(self, engine: LLMEngine, timeline: Timeline, of: dict[EngineSequence, RequestRecord]):
        self.engine, self.timeline, self.of = engine, timeline, of
        self.start = engine.clock()

    def now(self) -> float:
        return self.engine.clock() - self.start

    def to_the_end(self, desc: str) -> Timeline:
        scheduler = self.engine.scheduler
        pending = deque(sorted(self.of, key=lambda seq: self.of[seq].request.arrival))
        outputs = sum(record.request.num_output_tokens for record in self.timeline.requests)
        with tqdm(total=outputs, desc=desc, unit="tok") as bar:
            while pending or scheduler.has_unfinished():
                if not scheduler.has_unfinished():
                    time.sleep(max(0.0, self.of[pending[0]].request.arrival - self.now()))
                while pending and self.of[pending[0]].request.arrival <= self.now():
                    scheduler.add(pending.popleft())
                if scheduler.has_unfinished():
                    bar.update(self.step())
        return self.timeline

    def step(self) -> int:
        """One step, as in `LLMEngine.step`, and a note of what it was. Returns the number of tokens drawn."""
        engine, scheduler = self.engine, self.engine.scheduler
        start = self.now()
        output = scheduler.schedule()
        used = scheduler.blocks.num_usable_blocks - scheduler.blocks.num_free_blocks
        state = (len(scheduler.running), scheduler.num_waiting, len(output.preempted), used)
        logits = engine.runner.execute(output)
        drawn = sample(logits, logits_rows(output), [seq for seq, _ in output.sampled], engine.config.seed)
        scheduler.update(output, drawn.tokens)
        end = self.now()
        chunks = tuple(Chunk(self.of[seq].index, first, count) for seq, first, count in output.scheduled)
        self.timeline.rounds.append(Round(start, end, StepWork.of(output), *state, chunks))
        self._stamp(output, start, end)
        return len(drawn.tokens)

    def _stamp(self, output: SchedulerOutput, start: float, end: float) -> None:
        for seq, _, _ in output.scheduled:
            metrics = self.of[seq].metrics
            if metrics.scheduled is None:
                metrics.scheduled = start
        for seq, _ in output.sampled:
            metrics = self.of[seq].metrics
            metrics.token_times.append(end)
            if seq.status.finished:
                metrics.finished = end


def _sequence(engine: LLMEngine, record: RequestRecord) -> EngineSequence:
    vocabulary, request = engine.model_config.vocab_size, record.request
    tokens = [(7919 * (record.index + 1) + 31 * j) % vocabulary for j in range(request.num_prompt_tokens)]
    params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
    return EngineSequence(request.request_id, tokens, params)
