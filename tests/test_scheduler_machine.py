"""Any order of arrivals, steps, failures and ends, in tiny pools: the blocks, the memory and the rules stay right.

A shadow memory holds, for every slot, which prefix was written there, and every step checks what it is to read.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mini_engine.batch import Batch
from mini_engine.errors import RequestError
from mini_engine.eviction import make_policy
from mini_engine.host_tier import Fault, HostTier
from mini_engine.prefix_tier import PrefixTier
from mini_engine.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from mini_engine.sequence import Sequence, SequenceStatus
from mini_engine.transfer import TransferLink
from tests.scheduling import Draw, ShadowMemory, sequence

EOS = 0  # the other tokens are 1 and 2: so few that prefixes coincide by themselves
PREFIXES = [[1, 2, 1, 2, 1, 1, 2, 2], [1, 2, 1, 2, 2, 2, 2, 1, 1, 1], [2] * 12, []]
RUNNING, WAITING = SequenceStatus.RUNNING, SequenceStatus.WAITING
POLICIES: list[Any] = ["lru", "lru", "fifo", "lfu", "value"]
TROUBLES = ["stop string", "abort", "abort on the way", "failure"]


def random_config(draw: random.Random) -> SchedulerConfig:
    chunked, max_model_len = draw.random() < 0.7, draw.choice([6, 20, 40])
    swap = draw.random() < 0.4
    budget = draw.choice([1, 2, 3, 7, 30, 1000]) if chunked else max_model_len + draw.randrange(9)
    return SchedulerConfig(
        max_num_seqs=draw.choice([1, 2, 3, 4, 6, 9]),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=draw.choice([0, 0, 1, 3]) if chunked else 0,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw.random() < 0.7,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        batching=draw.choice(["continuous", "continuous", "fixed"]),
        admission=draw.choice(["preempt", "preempt", "reserve"]),
        max_model_len=max_model_len,
        block_size=draw.randint(1, 4),
        num_blocks=draw.randint(2, 12),
        eviction_policy=draw.choice(POLICIES),
        preemption_mode="swap" if swap else "recompute",
        num_host_blocks=draw.randint(1, 12) if swap else 0,
    )


def random_request(draw: random.Random, longest: int) -> dict[str, Any]:
    """Mostly one that the pool can hold, sometimes one that must be refused."""
    longest = max(1, longest + (3 if draw.random() < 0.1 else 0))
    tail = [draw.randint(EOS, 2) for _ in range(draw.randint(1, 5))]
    prompt = (draw.choice(PREFIXES)[: draw.randint(0, 12)] + tail)[-longest:]
    max_tokens = draw.randint(1, max(1, longest - len(prompt) + 1))
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "n": draw.choice([1, 1, 1, 2, 3]),
        "min_tokens": min(max_tokens, draw.choice([0, 0, 3])),
        "priority": draw.randint(-1, 1),
        "cache_salt": draw.choice([None, None, None, "a", "b"]),
    }


def random_tier(draw: random.Random, config: SchedulerConfig) -> PrefixTier | None:
    """Blocks of one byte; links from one that has always landed to one that hardly ever does. Time moves on within a
    step, as a real clock does."""
    if not config.enable_prefix_caching or draw.random() < 0.4:
        return None
    dice, slots = random.Random(draw.random()), draw.randint(1, 20)

    def recompute(new: int, history: int) -> float:
        return new + 0.01 * new * history

    now = 0.0

    def clock() -> float:
        nonlocal now
        now += dice.choice([0.0, 0.0, 0.2, 1.0])
        return now

    host = HostTier(
        slots,
        1,
        config.block_size,
        TransferLink(draw.choice([0.5, 30.0, 1e6, 1e6]), draw.choice([0.0, 0.0, 0.5])),
        recompute,
        draw.choice(["always", "always", "second_sight", "value"]),
        make_policy(draw.choice(POLICIES), slots),
        faults=lambda: Fault(dice.choice([1.0] * 5 + [5.0]), fails=dice.random() < 0.1),
    )
    return PrefixTier(host, clock, first_slot=config.num_host_blocks)


class SchedulerMachine(RuleBasedStateMachine):
    """`families` knows, like the engine, the sequences of a request from the moment each is first sampled.

    Half of the machines have a step in flight while the next one is scheduled, as in `LLMEngine._step_in_flight`. Then
    a copy from the host is done as early as it may be, before the step in flight computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.families: dict[str, list[Sequence]] = {}
        self.num_added = 0
        self.pending: set[Sequence] = set()
        self.num_scheduled = 0
        self.flight: tuple[SchedulerOutput, Batch] | None = None

    @initialize(draw=st.randoms(use_true_random=False))
    def start(self, draw: random.Random) -> None:
        self.config = config = random_config(draw)
        self.tier = random_tier(draw, config)
        self.scheduler = Scheduler(config, tier=self.tier)
        num_slots = config.num_host_blocks + (self.tier.host.num_slots if self.tier else 0)
        self.memory = ShadowMemory(config.num_blocks, config.block_size, num_slots)
        self.one_ahead = draw.random() < 0.5

    @rule(draw=st.randoms(use_true_random=False), num_requests=st.integers(1, 4))
    def add(self, draw: random.Random, num_requests: int) -> None:
        longest = min(self.config.max_model_len, (self.config.num_blocks - 1) * self.config.block_size)
        for _ in range(num_requests):
            fields = random_request(draw, longest)
            self._add(sequence(f"r{self.num_added}", eos_token_ids=frozenset({EOS}), **fields))

    @precondition(lambda self: self.families)
    @rule(draw=st.randoms(use_true_random=False), num_steps=st.integers(1, 8))
    def steps(self, draw: random.Random, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.families:
                self._step(lambda seq: draw.choice([1, 2, 1, 2, 1, 2, EOS]))

    @precondition(lambda self: self.families)
    @rule(draw=st.randoms(use_true_random=False), then=st.sampled_from(TROUBLES))
    def step_with_trouble(self, draw: random.Random, then: str) -> None:
        """A request ends after or during the step, or the step fails, or both at once."""
        request = draw.choice(sorted(self.families))
        fails = then == "failure" or (then == "abort on the way" and draw.random() < 0.3)
        aborted = request if then == "abort on the way" else None
        output = self._step(lambda seq: draw.choice([1, 2]), fails, aborted)
        if then == "stop string":
            self._finish([seq for seq, _ in output.sampled[:1]], SequenceStatus.FINISHED_STOPPED)
        if then == "abort":
            self._finish(self.families.get(request, ()))
        self._tidy()

    @precondition(lambda self: self.families)
    @rule(draw=st.randoms(use_true_random=False))
    def abort_between_steps(self, draw: random.Random) -> None:
        self._finish(self.families[draw.choice(sorted(self.families))])
        self._tidy()

    @rule()
    def reset_prefix_cache(self) -> None:
        idle = not self.scheduler.running and not self.scheduler.blocks.in_flight
        assert self.scheduler.reset_prefix_cache() == idle
        assert not idle or self._nothing_cached()

    def teardown(self) -> None:
        """Everything ends in a bounded number of steps: each computes at least one token."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.families:
                break
            self._step(lambda seq: 1)
        assert not self.families, f"starved: {self.families}"
        if self.flight is not None:
            self._step(lambda seq: 1)
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.blocks.num_free_blocks == self.config.num_blocks - 1

    def _step(self, draw: Draw, fails: bool = False, aborted: str | None = None) -> SchedulerOutput:
        """One step taken in, or failed, as the engine would; `aborted` ends while it runs, before its tokens come."""
        if not self.one_ahead:
            output, batch, ahead = self._schedule(), None, None
        else:
            output, batch = self.flight or self._submit(self._schedule())
            self._abort(aborted, output)
            aborted, self.flight = None, None
            ahead = self._schedule(output)
            self.memory.swap(ahead)
        if fails:
            self.memory.fail(output, batch, ahead)
        else:
            self.memory.forward(output, batch)
        self._abort(aborted, output)
        if fails:
            self.scheduler.undo(*((output,) if ahead is None else (output, ahead)))
            assert not self.scheduler.running and self._nothing_cached()
            self._tidy()
            return output
        self._update(output, [draw(seq) for seq, _ in output.sampled])
        if ahead is not None and ahead.scheduled:
            self._learn(ahead)
            self.flight = ahead, self.memory.build(ahead)
        return output

    def _nothing_cached(self) -> bool:
        return not self.scheduler.blocks.pool.cached and not (self.tier and self.tier.host.used_bytes)

    def _submit(self, output: SchedulerOutput) -> tuple[SchedulerOutput, Batch]:
        self.memory.swap(output)
        self._learn(output)
        return output, self.memory.build(output)

    def _learn(self, output: SchedulerOutput) -> None:
        for seq, _ in output.sampled:
            family = self.families.get(seq.request_id, [seq])
            if seq not in family:
                family.append(seq)

    def _abort(self, request: str | None, output: SchedulerOutput) -> None:
        if request is not None:
            siblings = [seq for seq, _ in output.sampled if seq.request_id == request]
            self._finish([*self.families[request], *siblings])

    def _add(self, seq: Sequence) -> None:
        try:
            self.scheduler.add(seq)
        except RequestError as error:
            assert self._can_never_be_served(seq), f"refused for no reason: {error}"
            return
        assert not self._can_never_be_served(seq)
        self.families[seq.request_id] = [seq]
        self.num_added += 1

    def _finish(self, sequences: Iterable[Sequence], status: SequenceStatus = SequenceStatus.FINISHED_ABORTED) -> None:
        for seq in sequences:
            self.scheduler.finish(seq, status)

    def _can_never_be_served(self, seq: Sequence) -> bool:
        config, n = self.config, seq.params.n
        prompt, size, pool = len(seq.token_ids), self.config.block_size, self.config.num_blocks - 1
        length = prompt + seq.max_tokens - 1
        need = -(-length // size)
        if config.admission == "reserve":
            need += (n - 1) * (need - prompt // size)
        return prompt == 0 or length > config.max_model_len or n > config.max_num_seqs or need > pool

    def _schedule(self, in_flight: SchedulerOutput | None = None) -> SchedulerOutput:
        scheduler, config = self.scheduler, self.config
        computed = {seq: seq.num_computed_tokens for seq in scheduler.running}
        drawing = {seq for seq, _ in in_flight.sampled} if in_flight is not None else set()
        self.pending = {seq for seq in drawing & set(computed) if seq.num_output_tokens + 1 < seq.max_tokens}
        left = {seq: self._length(seq) - seq.num_computed_tokens for seq in computed}
        decodes = {seq for seq in computed if left[seq] == 1}
        on_host = {seq: (seq.num_computed_tokens, len(seq.host_slots)) for seq in scheduler.waiting if seq.host_slots}
        branched = {seq for seq in computed if seq.num_forks == 0}
        preemptions = scheduler.stats.num_preemptions
        output = scheduler.schedule()
        self.num_scheduled += output.num_tokens
        scheduled = [item.seq for item in output.scheduled]
        admitted = [seq for seq in scheduler.running if seq not in computed and seq.index == 0]
        admitted += [seq for seq in scheduled if seq not in computed and seq.index > 0]

        assert scheduled or not (output.swap_out or output.swap_in), "copies of a step that is never submitted"
        assert scheduled or in_flight is not None, "an idle step while requests are unfinished"
        assert not (output.preempted and in_flight is not None), "a victim may still be computed"
        assert len(set(scheduled)) == len(scheduled)
        assert output.num_tokens <= config.max_num_batched_tokens
        assert scheduler.stats.num_scheduled_tokens == self.num_scheduled
        assert sum(1 + seq.num_forks for seq in scheduler.running) <= config.max_num_seqs
        assert scheduler.stats.num_preemptions - preemptions == len(set(output.preempted)) == len(output.preempted)
        assert not (config.admission == "reserve" and output.preempted), "reserved blocks were not there"
        assert not (admitted and output.preempted), "admitted in a step that preempted"
        assert not (config.batching == "fixed" and computed and admitted), "a fixed batch was joined"

        for seq, start, num_tokens in output.scheduled:
            assert 1 <= num_tokens <= (config.long_prefill_token_threshold or config.max_num_batched_tokens)
            if seq in computed:
                assert start == computed[seq]
            elif seq in on_host:
                assert start >= on_host[seq][0] and seq.host_slots == [], "what the host held is computed again"
            else:
                assert start % config.block_size == 0 and (config.enable_prefix_caching or start == 0)
            assert start + num_tokens == seq.num_computed_tokens <= self._length(seq)
            assert self._length(seq) <= len(seq.block_table) * config.block_size
            if not config.enable_chunked_prefill:
                assert seq.num_computed_tokens == self._length(seq)

        kinds = [0 if seq in decodes else 1 if seq in computed else 2 for seq in scheduled]
        assert kinds == sorted(kinds), "decodes first, then other running ones, then new ones"
        if output.num_tokens < config.max_num_batched_tokens and not scheduler.steps.starved:
            have_work = {seq for seq in computed if left[seq] > 0}
            assert set(scheduled) >= have_work - set(output.preempted), "budget was left, yet one had to wait"

        self._check_ranks(output, admitted)
        self._check_samples(output, branched)
        self._check_blocks()
        return output

    def _check_ranks(self, output: SchedulerOutput, admitted: list[Sequence]) -> None:
        def rank(seq: Sequence) -> tuple[int, int, int]:
            return (seq.priority * (self.config.scheduling_policy == "priority"), seq.arrival, seq.index)

        for victim in output.preempted:
            assert victim.status is WAITING and victim.block_table == []
            assert len(victim.host_slots) == -(-victim.num_computed_tokens // self.config.block_size)
            assert all(rank(victim) > rank(seq) for seq in self.scheduler.running), f"{victim} was not the last in rank"
        waiting = [seq for family in self.families.values() for seq in family if seq.status is WAITING]
        assert all(rank(seq) < rank(other) for seq in admitted for other in waiting), "one overtook another"

    def _check_samples(self, output: SchedulerOutput, branched: set[Sequence]) -> None:
        sampled = [seq for seq, _ in output.sampled]
        assert len(set(sampled)) == len(sampled)
        for seq, row in output.sampled:
            source = output.scheduled[row].seq
            assert source.request_id == seq.request_id and source.token_ids == seq.token_ids
            assert seq.num_computed_tokens == self._length(seq) == sum(output.scheduled[row][1:])
        complete = {item.seq for item in output.scheduled if item.seq.num_computed_tokens == self._length(item.seq)}
        assert complete <= set(sampled), "all tokens are computed, yet none is drawn"
        for seq in complete - branched:
            family = [other.index for other in sampled if other.request_id == seq.request_id]
            if seq.index == 0 and seq.num_output_tokens == 0 and seq not in self.pending:
                assert sorted(family) == list(range(seq.params.n)), "the siblings draw their first token together"

    def _check_blocks(self) -> None:
        self.scheduler.check()
        known = {seq for family in self.families.values() for seq in family} | set(self.scheduler.running)
        self.scheduler.blocks.check(known - set(self.scheduler.blocks.in_flight))
        self.scheduler.host.check(known)

    def _length(self, seq: Sequence) -> int:
        """Tokens of a sequence, one that the step in flight draws for it included."""
        return seq.num_tokens + (seq in self.pending)

    def _update(self, output: SchedulerOutput, tokens: list[int]) -> None:
        self._learn(output)
        self.pending = set()
        before = {seq: seq.num_tokens for seq, _ in output.sampled}
        ended = {seq for seq in before if seq.status.finished}
        finished = self.scheduler.update(output, tokens)
        for (seq, _), token in zip(output.sampled, tokens, strict=True):
            if seq in ended:
                assert seq.num_tokens == before[seq] and seq not in finished
                continue
            assert seq.token_ids[before[seq] :] == [token]
            stops = token == EOS and seq.num_output_tokens >= seq.params.min_tokens
            assert (seq in finished) == (stops or seq.num_output_tokens == seq.max_tokens)
            assert not seq.status.finished or seq.status.value == ("stop" if stops else "length")
        self._tidy()

    def _tidy(self) -> None:
        """Forget what has ended, as the engine does, and check what is left."""
        for request, family in list(self.families.items()):
            idle = [seq for seq in family if seq.status is not RUNNING]
            assert all(not seq.block_table or seq in self.scheduler.blocks.in_flight for seq in idle)
            if all(seq.status.finished for seq in family):
                del self.families[request]
        self._check_blocks()
        for seq in self.scheduler.running:
            assert seq.request_id in self.families, f"{seq} outlived its request"
        assert self.scheduler.has_unfinished() == bool(self.families)
        assert all(self.scheduler.steps.computes(seq) for seq in self.scheduler.blocks.in_flight)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = hypothesis_settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(150))
def test_long_histories(seed: int) -> None:
    """The same rules in long even mixtures, which a search for short examples seldom comes to."""
    draw = random.Random(seed)
    machine = SchedulerMachine()
    machine.start(draw)
    for _ in range(40):
        kind = draw.random()
        if kind < 0.4 or not machine.families:
            machine.add(draw, draw.randint(1, 4))
        elif kind < 0.85:
            machine.steps(draw, draw.randint(1, 8))
        elif kind < 0.95:
            machine.step_with_trouble(draw, draw.choice(TROUBLES))
        elif kind < 0.98:
            machine.abort_between_steps(draw)
        else:
            machine.reset_prefix_cache()
    machine.teardown()
