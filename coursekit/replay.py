"""A workload played against the real engine, on this machine's clock: the measured twin of `mini_engine.simulator`.

    played = replay(engine, requests)      the same requests as for simulate(requests, …)
    played.timeline                        the same Timeline as simulate returns, in measured seconds
    measured_steps(played.timeline)        what fit_run wants

Prompts are made up of token ids, since only lengths matter here. Requests arrive when they were planned to, whether or
not the engine is free to notice: it looks for new ones between two steps only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from mini_engine import LLMEngine, SamplingParams
from mini_engine.batch import logits_rows
from mini_engine.metrics import RequestMetrics
from mini_engine.sampler import sample
from mini_engine.scheduler import SchedulerOutput
from mini_engine.sequence import Sequence as EngineSequence
from mini_engine.sequence import SequenceStatus
from mini_engine.simulator import MeasuredStep, Request, Timeline
from mini_engine.simulator.cost import StepWork
from mini_engine.simulator.timeline import Chunk, RequestRecord, Round


@dataclass(frozen=True)
class Replay:
    """timeline: times in seconds since the start; a request's `arrival` is the planned one.

    noticed: when the scheduler first knew of each request. A queue time counted from here leaves out the wait for the
    round that was running when the request came.
    """

    timeline: Timeline
    noticed: tuple[float, ...]


def replay(engine: LLMEngine, requests: Sequence[Request], *, progress: bool = True) -> Replay:
    """Run the requests to their end. Raises RequestError for one that the engine could never serve."""
    sequences = [_sequence(engine, request, i) for i, request in enumerate(requests)]
    for seq in sequences:
        engine.scheduler.validate(seq)
    engine.reset_prefix_cache()
    records = [RequestRecord(i, request, RequestMetrics(request.arrival)) for i, request in enumerate(requests)]
    run = _Run(engine, Timeline(engine.scheduler.config, records), dict(zip(sequences, records, strict=True)))
    pending = deque(sorted(run.of, key=lambda seq: run.of[seq].request.arrival))
    noticed = [0.0] * len(records)
    steps = sum(request.num_output_tokens for request in requests)
    with tqdm(total=steps, desc="output tokens", unit="tok", disable=not progress) as bar:
        while pending or engine.scheduler.has_unfinished():
            if pending and not engine.scheduler.has_unfinished():
                time.sleep(max(0.0, run.of[pending[0]].request.arrival - run.now()))
            while pending and run.of[pending[0]].request.arrival <= run.now():
                seq = pending.popleft()
                noticed[run.of[seq].index] = run.now()
                engine.scheduler.add(seq)
            if engine.scheduler.has_unfinished():
                bar.update(run.step())
    return Replay(run.timeline, tuple(noticed))


def measured_steps(*timelines: Timeline) -> list[MeasuredStep]:
    """Work and seconds of every round."""
    return [
        MeasuredStep(round_.work.num_tokens, round_.work.num_pairs, round_.end - round_.start)
        for timeline in timelines
        for round_ in timeline.rounds
    ]


def chunk_seconds(timeline: Timeline) -> list[float]:
    """Seconds of the rounds that computed part of a prompt."""
    prompts = [record.request.num_prompt_tokens for record in timeline.requests]
    return [
        round_.end - round_.start
        for round_ in timeline.rounds
        if any(chunk.start < prompts[chunk.request] for chunk in round_.chunks)
    ]


class _Run:
    def __init__(self, engine: LLMEngine, timeline: Timeline, of: dict[EngineSequence, RequestRecord]):
        self.engine, self.timeline, self.of = engine, timeline, of
        self.start = engine.clock()

    def now(self) -> float:
        return self.engine.clock() - self.start

    def step(self) -> int:
        """One step, as in `LLMEngine.step`, with a note of what it was. Returns the number of tokens drawn."""
        engine, scheduler = self.engine, self.engine.scheduler
        start = self.now()
        output = scheduler.schedule()
        used = scheduler.blocks.num_usable_blocks - scheduler.blocks.num_free_blocks
        running, waiting = len(scheduler.running), scheduler.num_waiting
        try:
            logits = engine.runner.execute(output)
            drawn = sample(logits, logits_rows(output), [seq for seq, _ in output.sampled], engine.config.seed)
        except BaseException:
            scheduler.undo(output)
            for seq in self.of:
                scheduler.finish(seq, SequenceStatus.FINISHED_ABORTED)
            raise
        scheduler.update(output, drawn.tokens)
        end = self.now()
        chunks, work = tuple(self._chunks(output)), StepWork.of(output)
        self.timeline.rounds.append(Round(start, end, work, running, waiting, len(output.preempted), used, chunks))
        self._stamp(output, start, end)
        return len(drawn.tokens)

    def _chunks(self, output: SchedulerOutput) -> Iterable[Chunk]:
        for seq, start, num_tokens in output.scheduled:
            yield Chunk(self.of[seq].index, start, num_tokens)

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


def _sequence(engine: LLMEngine, request: Request, number: int) -> EngineSequence:
    vocabulary = engine.model_config.vocab_size
    tokens = [(7919 * (number + 1) + 31 * j) % vocabulary for j in range(request.num_prompt_tokens)]
    params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
    return EngineSequence(request.request_id, tokens, params)
