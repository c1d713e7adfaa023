"""Which tokens to compute next: one token budget, running sequences first, then admission.

A step computes, for each chosen sequence, some of the tokens it has and has not computed. A decode is a sequence with
one such token, a prefill one with many; nothing else tells them apart. `schedule()` moves `num_computed_tokens` on;
`update()` appends what the model drew and ends what is finished.

While a step is in flight the next one may be scheduled: a sequence that draws a token in the first gets the position of
that token in the second, since only its value is missing. Nobody is preempted meanwhile, so a victim's blocks are at
rest: a sequence that finds no block waits until the step has landed.

Source: book 8.2.2 (fixed, continuous, chunked), 8.1.2 (admission); vLLM V1's scheduler for names and order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mini_engine.admission import blocks_to_finish, refuse_unservable
from mini_engine.block import Block, BlockCopy
from mini_engine.block_manager import BlockManager
from mini_engine.cache_key import CacheKey
from mini_engine.config import SchedulerConfig
from mini_engine.eviction import make_policy
from mini_engine.in_flight import StepsInFlight
from mini_engine.prefix_tier import PrefixTier
from mini_engine.request_queue import RequestQueue
from mini_engine.scheduler_output import ScheduledSequence, SchedulerOutput, SchedulerStats
from mini_engine.sequence import Sequence, SequenceStatus
from mini_engine.swap import HostBlocks

RUNNING = SequenceStatus.RUNNING
Scheduled = list[ScheduledSequence]
Sampled = list[tuple[Sequence, int]]


class Scheduler:
    """Owns the waiting and the running sequences, and the block manager that gives them KV blocks."""

    def __init__(self, config: SchedulerConfig, cache_key: CacheKey | None = None, tier: PrefixTier | None = None):
        self.config = config
        order = make_policy(config.eviction_policy, config.num_blocks)
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching, order, cache_key)
        self.running: list[Sequence] = []  # in the order of admission
        self.waiting = RequestQueue(config.scheduling_policy)
        self.steps = StepsInFlight()
        self.stats = SchedulerStats()
        self.host = HostBlocks(config, self.stats)
        self.tier = tier
        if tier is not None:
            tier.attach(self.blocks)
        self._arrivals = 0
        self._limit = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError, with the numbers, for one that could never be served."""
        self.validate(seq)
        self._arrivals += 1
        seq.arrival = self._arrivals
        self.waiting.push(seq)

    def validate(self, seq: Sequence) -> None:
        """Raise RequestError or PoolTooSmall if no amount of waiting would let `seq` finish."""
        refuse_unservable(seq, self.config, self.blocks)

    def finish(self, seq: Sequence, status: SequenceStatus) -> None:
        """End a sequence now: an abort, or a stop string that only the text shows.

        Its blocks come free at once, or when the step in flight that computes it has landed.
        """
        if seq.status.finished:
            return
        if seq.status is RUNNING:
            self.running.remove(seq)
            self._release(seq)
        else:
            self.waiting.remove(seq)
            self.host.drop(seq)
        seq.status = status
        seq.num_forks = 0  # siblings that have not branched off by now never will

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def has_unfinished(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens within the token budget, and give them blocks.

        With a step in flight it may choose nothing, where the blocks do not suffice: that step must land first.
        Raises RuntimeError with two steps in flight.
        """
        ahead = self.steps.expect_tokens()
        if self.steps.starved:
            return SchedulerOutput((), (), (), ())
        self.steps.step += 1
        budget = self.config.max_num_batched_tokens
        may_admit = self.config.batching == "continuous" or not self.running
        chosen: dict[Sequence, int] = {}
        block_copies: dict[Sequence, Seq[BlockCopy]] = {}
        preempted: list[Sequence] = []
        swap_out: list[BlockCopy] = []
        for seq in self._decodes_first():
            if seq.status is not RUNNING:
                continue  # preempted by one before it
            to_compute = len(seq.token_ids) + seq.num_pending_tokens - seq.num_computed_tokens
            num_tokens = min(to_compute, self._limit, budget)
            if num_tokens == 0:
                continue
            while (copies := self.blocks.grow(seq, seq.num_computed_tokens + num_tokens)) is None:
                if ahead:
                    self.steps.starved = True
                    break
                victim = max(self.running, key=self.waiting.rank)
                budget += chosen.pop(victim, 0)
                lost_copies = block_copies.pop(victim, ())
                swap_out += self.host.swap_out(victim, lost_copies)
                self._preempt(victim)
                self.blocks.pool.unhold(lost_copies)
                preempted.append(victim)
                if victim is seq:
                    break
            else:
                chosen[seq] = num_tokens
                budget -= num_tokens
                if copies:
                    block_copies[seq] = copies
            if self.steps.starved:
                break

        scheduled: Scheduled = []
        sampled: Sampled = []
        for seq, num_tokens in chosen.items():
            self._commit(seq, num_tokens, scheduled, sampled)
        swap_in: list[BlockCopy] = []
        if may_admit and not preempted and not self.steps.starved and self.waiting:
            budget = self._admit(budget, scheduled, sampled, swap_in)
        used = self.blocks.num_usable_blocks - self.blocks.num_free_blocks
        self.stats.peak_used_blocks = max(self.stats.peak_used_blocks, used)
        self.stats.num_scheduled_tokens += self.config.max_num_batched_tokens - budget
        if self.tier is not None:
            swap_out += self.tier.end_step()
        copies_in_order = tuple(copy for copies in block_copies.values() for copy in copies)
        step = (tuple(scheduled), tuple(sampled), tuple(preempted), copies_in_order, tuple(swap_out), tuple(swap_in))
        output = SchedulerOutput(*step, self.steps.step)
        self.steps.add(output)
        return output

    def update(self, output: SchedulerOutput, tokens: Seq[int]) -> list[Sequence]:
        """Take in the tokens drawn for `output.sampled`, in that order; returns the sequences that finished.

        A sequence that was ended while the step ran keeps what it had: its token is thrown away.
        """
        self.steps.land(output)
        self.blocks.pool.unhold(output.block_copies)
        if self.blocks.in_flight:
            self.blocks.land(output.step)
        finished = []
        for (seq, _), token in zip(output.sampled, tokens, strict=True):
            if seq.status is not RUNNING:
                continue
            seq.token_ids.append(token)
            num_output = len(seq.token_ids) - seq.num_prompt_tokens
            if token in seq.stop_ids and num_output >= seq.params.min_tokens:
                seq.status = SequenceStatus.FINISHED_STOPPED
            elif num_output >= seq.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH
            else:
                continue
            self._release(seq)
            finished.append(seq)
        if finished:
            self.running = [seq for seq in self.running if seq.status is RUNNING]
        self.steps.learn_tokens(output, self.blocks)
        return finished

    def undo(self, *outputs: SchedulerOutput) -> None:
        """The step failed or was interrupted: nothing it was to write can be trusted. With a step scheduled behind it,
        both are undone: give the failed one first.

        Every running sequence goes back to waiting, to be computed anew, and the prefix cache is emptied.
        """
        self.steps.land_all()
        self.blocks.land(self.steps.landed)
        for output in outputs:
            self.blocks.pool.unhold(output.block_copies)
            for seq, row in output.sampled:
                seq.num_pending_tokens = 0
                if seq.index > 0 and seq.num_output_tokens == 0 and seq.status is RUNNING:
                    # Branched off by this very step, so nobody outside knows it: its parent branches again.
                    self.finish(seq, SequenceStatus.FINISHED_ABORTED)
                    parent = output.scheduled[row].seq
                    parent.num_forks += not parent.status.finished
            for seq in output.preempted:  # the copy to the host may not have been done
                self.host.drop(seq)
                seq.num_computed_tokens = 0
        for seq in list(self.running):
            self._preempt(seq)
        self.reset_prefix_cache()  # with the host's part, since a copy out may not have been made

    def reset_prefix_cache(self) -> bool:
        """Forget every known prefix, on the host too. Refuses (False) while any block is in use."""
        done = self.blocks.reset_prefix_cache()
        if done and self.tier is not None:
            self.tier.host.clear()
        return done

    def check(self) -> None:
        """Between steps: every block and every host slot has the owners it should have. Raises AssertionError."""
        self.blocks.check(self.running)
        self.host.check(self.waiting)
        if self.tier is not None:
            self.tier.host.check()

    def _release(self, seq: Sequence) -> None:
        if self.steps.computes(seq):
            self.blocks.free_when_landed(seq)
        else:
            self.blocks.free(seq)

    def _decodes_first(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        others: list[Sequence] = []
        for seq in self.running:
            to_compute = len(seq.token_ids) + seq.num_pending_tokens - seq.num_computed_tokens
            (decodes if to_compute == 1 else others).append(seq)
        return decodes + others

    def _admit(self, budget: int, scheduled: Scheduled, sampled: Sampled, swap_in: list[BlockCopy]) -> int:
        """Admit waiting sequences in order of rank, until budget, seats or blocks run out; none overtakes another.

        A fixed batch is put together at once: a member that the budget leaves no tokens for starts in a later step.
        Returns what is left of the budget.
        """
        blocks, reserve, fixed = self.blocks, self.config.admission == "reserve", self.config.batching == "fixed"
        seats = self.config.max_num_seqs - sum(1 + seq.num_forks for seq in self.running)
        free = blocks.num_free_blocks
        if reserve:
            free -= sum(blocks_to_finish(seq, self.config, blocks) - len(seq.block_table) for seq in self.running)
        while self.waiting and (budget > 0 or fixed):
            seq = self.waiting.first()
            if 1 + seq.num_forks > seats:
                break
            hits = blocks.match_prefix(seq)
            whole = blocks_to_finish(seq, self.config, blocks) if reserve else blocks.blocks_for(seq.num_tokens)
            needed = whole - blocks.num_shared(hits)
            to_compute = seq.num_tokens - max(len(hits) * blocks.block_size, seq.num_computed_tokens)
            num_tokens = min(to_compute, self._limit, budget)
            if needed > free or not (num_tokens == to_compute or self.config.enable_chunked_prefill):
                break
            self.waiting.pop()
            swap_in += self._start(seq, hits)
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, self._limit, budget)  # less what is fetched
            seats -= 1 + seq.num_forks
            free -= needed
            budget -= num_tokens
            if num_tokens:
                self._commit(seq, num_tokens, scheduled, sampled)
        return budget

    def _commit(self, seq: Sequence, num_tokens: int, scheduled: Scheduled, sampled: Sampled) -> None:
        """Write a decision down: move the counter, publish full blocks, branch off the siblings of the prompt."""
        start = seq.num_computed_tokens
        end = seq.num_computed_tokens = start + num_tokens
        size = self.config.block_size
        first, last = start // size, end // size
        if first != last and not seq.num_pending_tokens:  # else its last token is not known yet: see StepsInFlight
            self.blocks.cache_full_blocks(seq, first, last)
        scheduled.append(ScheduledSequence(seq, start, num_tokens))
        seq.last_step = self.steps.step
        if end != len(seq.token_ids) + seq.num_pending_tokens:
            return
        row = len(scheduled) - 1
        sampled.append((seq, row))
        if seq.num_forks:
            self._branch_off(seq, row, sampled)

    def _start(self, seq: Sequence, hits: list[Block]) -> Seq[BlockCopy]:
        """Let a waiting sequence run. Returns the copies that bring back what the host holds beyond the hits."""
        on_host, size = seq.num_computed_tokens, self.config.block_size
        fetched = self.tier.fetch(seq, len(hits)) if self.tier is not None and not seq.host_slots else None
        self.blocks.admit(seq, hits)
        self.stats.prefix_query_tokens += seq.num_tokens
        self.stats.prefix_hit_tokens += seq.num_computed_tokens
        copies: Seq[BlockCopy] = self.host.swap_in(seq, len(hits))
        if fetched:
            copies = tuple(zip(fetched, seq.block_table[len(hits) :], strict=False))
            on_host = seq.num_computed_tokens + len(fetched) * size
            self.stats.host_hit_tokens += len(fetched) * size
        if copies:
            seq.num_computed_tokens = on_host
            self.blocks.cache_full_blocks(seq, len(hits), on_host // size)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = RUNNING
        seq.last_step = self.steps.step
        self.running.append(seq)
        return copies

    def _branch_off(self, seq: Sequence, row: int, sampled: Sampled) -> None:
        for i in range(seq.num_forks):
            child = seq.fork(i + 1)
            self.blocks.fork(seq, child)
            child.status = RUNNING
            self.running.append(child)
            sampled.append((child, row))
        seq.num_forks = 0

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks back. What they held is computed again, less what the prefix cache still knows by then,
        unless the host has it."""
        self.running.remove(seq)
        self.blocks.free(seq)
        if not seq.host_slots:
            seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.push(seq)
