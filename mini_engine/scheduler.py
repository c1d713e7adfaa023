"""Which tokens to compute next: one token budget, running sequences first, then admission.

A step computes, for each chosen sequence, some of the tokens it has and has not computed. A decode is a sequence with
one such token, a prefill one with many; nothing else tells them apart. `schedule()` moves `num_computed_tokens` on;
`update()` appends what the model drew and ends what is finished.

Source: book 8.2.2 (fixed, continuous, chunked), 8.1.2 (admission); vLLM V1's scheduler for names and order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.block_manager import BlockManager
from mini_engine.block_pool import BlockCopy
from mini_engine.config import SchedulerConfig
from mini_engine.errors import PoolTooSmall, RequestError
from mini_engine.sequence import Sequence, SequenceStatus

RUNNING = SequenceStatus.RUNNING


class ScheduledSequence(NamedTuple):
    """Compute the tokens `start` to `start + num_tokens - 1` of `seq`."""

    seq: Sequence
    start: int
    num_tokens: int


class SchedulerOutput(NamedTuple):
    """One step's work. It stays true while the sequences move on.

    scheduled: what to compute, in the order of the batch.
    sampled: the sequences to draw a token for, each with the index in `scheduled` after whose last token it draws;
        siblings of an `n > 1` request share one.
    preempted: sequences that lost their blocks in this step and wait again.
    block_copies: (source, destination) blocks to copy before the forward pass.
    """

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[tuple[Sequence, int], ...]
    preempted: tuple[Sequence, ...]
    block_copies: tuple[BlockCopy, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass
class SchedulerStats:
    """Counters since the start. Prefix figures are in tokens, over admissions; the peak is in blocks."""

    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    peak_used_blocks: int = 0


class Scheduler:
    """Owns the waiting and the running sequences, and the block manager that gives them KV blocks."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.enable_prefix_caching)
        self.running: list[Sequence] = []  # in the order of admission
        self.waiting: list[tuple[int, int, int, Sequence]] = []  # a heap; ended ones are dropped on their way out
        self.num_waiting = 0
        self.stats = SchedulerStats()
        self._arrivals = 0
        self._limit = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError, with the numbers, for one that could never be served."""
        self.validate(seq)
        self._arrivals += 1
        seq.arrival = self._arrivals
        self._enqueue(seq)

    def validate(self, seq: Sequence) -> None:
        """Raise RequestError or PoolTooSmall if no amount of waiting would let `seq` finish."""
        config, prompt, output = self.config, seq.num_prompt_tokens, seq.max_tokens
        if prompt == 0:
            raise RequestError("the prompt is empty: it needs at least one token")
        if seq.num_tokens_to_finish > config.max_model_len:
            fits = config.max_model_len - prompt + 1
            raise RequestError(
                f"{prompt} prompt + {output} output tokens exceed max_model_len {config.max_model_len}: "
                + (f"ask for at most {fits} output tokens" if fits > 0 else "shorten the prompt")
            )
        if 1 + seq.num_forks > config.max_num_seqs:
            raise RequestError(f"n={1 + seq.num_forks} outputs exceed max_num_seqs {config.max_num_seqs}")
        needed, usable, size = self._blocks_to_hold(seq, finish=True), self.blocks.num_usable_blocks, config.block_size
        if needed > usable:
            raise PoolTooSmall(
                f"the request needs {needed} blocks of {size} tokens ({prompt} prompt + {output} output), the pool has "
                f"{usable}. Ask for at most {usable * size + 1} tokens in all, or give the pool {needed + 1} blocks "
                f"(kv_cache_memory_bytes or num_gpu_blocks_override; the null block is one of them)"
            )

    def finish(self, seq: Sequence, status: SequenceStatus) -> None:
        """End a sequence now and take its blocks back: an abort, or a stop string that only the text shows."""
        if seq.status.finished:
            return
        if seq.status is RUNNING:
            self.running.remove(seq)
            self.blocks.free(seq)
        else:
            self.num_waiting -= 1
        seq.status = status
        seq.num_forks = 0  # siblings that have not branched off by now never will

    def has_unfinished(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens within the token budget, and give them blocks."""
        budget = self.config.max_num_batched_tokens
        may_admit = self.config.batching == "continuous" or not self.running
        chosen: dict[Sequence, int] = {}
        block_copies: dict[Sequence, Seq[BlockCopy]] = {}
        preempted: list[Sequence] = []
        for seq in self._decodes_first():
            if seq.status is not RUNNING:
                continue  # preempted by one before it
            num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, self._limit, budget)
            if num_tokens == 0:
                continue
            while (copies := self.blocks.grow(seq, seq.num_computed_tokens + num_tokens)) is None:
                victim = max(self.running, key=self._rank)
                self._preempt(victim)
                preempted.append(victim)
                budget += chosen.pop(victim, 0)
                self.blocks.pool.unhold(block_copies.pop(victim, ()))
                if victim is seq:
                    break
            else:
                chosen[seq] = num_tokens
                budget -= num_tokens
                if copies:
                    block_copies[seq] = copies

        scheduled: list[ScheduledSequence] = []
        sampled: list[tuple[Sequence, int]] = []
        for seq, num_tokens in chosen.items():
            self._commit(seq, num_tokens, scheduled, sampled)
        if may_admit and not preempted and self.num_waiting:
            budget = self._admit(budget, scheduled, sampled)
        self.stats.peak_used_blocks = max(
            self.stats.peak_used_blocks, self.blocks.num_usable_blocks - self.blocks.num_free_blocks
        )
        self.stats.num_scheduled_tokens += self.config.max_num_batched_tokens - budget
        copies_in_order = tuple(copy for copies in block_copies.values() for copy in copies)
        return SchedulerOutput(tuple(scheduled), tuple(sampled), tuple(preempted), copies_in_order)

    def update(self, output: SchedulerOutput, tokens: Seq[int]) -> list[Sequence]:
        """Take in the tokens drawn for `output.sampled`, in that order; returns the sequences that finished.

        A sequence that was ended while the step ran keeps what it had.
        """
        self.blocks.pool.unhold(output.block_copies)
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
            self.blocks.free(seq)
            finished.append(seq)
        if finished:
            self.running = [seq for seq in self.running if seq.status is RUNNING]
        return finished

    def undo(self, output: SchedulerOutput) -> None:
        """The step failed or was interrupted: nothing it was to write can be trusted.

        Every running sequence goes back to waiting, to be computed anew, and the prefix cache is emptied.
        """
        self.blocks.pool.unhold(output.block_copies)
        for seq, row in output.sampled:
            if seq.index > 0 and seq.num_output_tokens == 0 and seq.status is RUNNING:
                # Branched off by this very step, so nobody outside knows it: its parent branches again.
                self.finish(seq, SequenceStatus.FINISHED_ABORTED)
                parent = output.scheduled[row].seq
                parent.num_forks += not parent.status.finished
        for seq in list(self.running):
            self._preempt(seq)
        self.blocks.reset_prefix_cache()

    def _rank(self, seq: Sequence) -> tuple[int, int, int]:
        """Who goes first: the lowest priority value, then the earliest arrival. The last in rank is preempted."""
        return (seq.priority if self.config.scheduling_policy == "priority" else 0, seq.arrival, seq.index)

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heapq.heappush(self.waiting, (*self._rank(seq), seq))
        self.num_waiting += 1

    def _decodes_first(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        others: list[Sequence] = []
        for seq in self.running:
            (decodes if len(seq.token_ids) - seq.num_computed_tokens == 1 else others).append(seq)
        return decodes + others

    def _admit(self, budget: int, scheduled: list[ScheduledSequence], sampled: list[tuple[Sequence, int]]) -> int:
        """Admit waiting sequences in order of rank, until budget, seats or blocks run out; none overtakes another.

        A fixed batch is put together at once: a member that the budget leaves no tokens for starts in a later step.
        Returns what is left of the budget.
        """
        blocks, reserve, fixed = self.blocks, self.config.admission == "reserve", self.config.batching == "fixed"
        seats = self.config.max_num_seqs - sum(1 + seq.num_forks for seq in self.running)
        free = blocks.num_free_blocks
        if reserve:
            free -= sum(self._blocks_to_hold(seq, finish=True) - len(seq.block_table) for seq in self.running)
        while self.num_waiting and (budget > 0 or fixed):
            seq = self.waiting[0][-1]
            if seq.status is not SequenceStatus.WAITING:
                heapq.heappop(self.waiting)
                continue
            if 1 + seq.num_forks > seats:
                break
            hits = blocks.match_prefix(seq)
            needed = self._blocks_to_hold(seq, finish=reserve) - blocks.num_shared(hits)
            seq.num_computed_tokens = len(hits) * blocks.block_size
            num_tokens = min(seq.num_tokens - seq.num_computed_tokens, self._limit, budget)
            whole = num_tokens == seq.num_tokens - seq.num_computed_tokens
            if needed > free or not (whole or self.config.enable_chunked_prefill):
                seq.num_computed_tokens = 0
                break
            heapq.heappop(self.waiting)
            self.num_waiting -= 1
            blocks.admit(seq, hits)
            seq.status = RUNNING
            self.running.append(seq)
            self._count_admission(seq)
            seats -= 1 + seq.num_forks
            free -= needed
            budget -= num_tokens
            if num_tokens:
                self._commit(seq, num_tokens, scheduled, sampled)
        return budget

    def _commit(
        self, seq: Sequence, num_tokens: int, scheduled: list[ScheduledSequence], sampled: list[tuple[Sequence, int]]
    ) -> None:
        """Write a decision down: move the counter, publish full blocks, branch off the siblings of the prompt."""
        start = seq.num_computed_tokens
        end = seq.num_computed_tokens = start + num_tokens
        size = self.config.block_size
        first, last = start // size, end // size
        if first != last:
            self.blocks.cache_full_blocks(seq, first, last)
        scheduled.append(ScheduledSequence(seq, start, num_tokens))
        if end != len(seq.token_ids):
            return
        row = len(scheduled) - 1
        sampled.append((seq, row))
        if seq.num_forks:
            self._branch_off(seq, row, sampled)

    def _branch_off(self, seq: Sequence, row: int, sampled: list[tuple[Sequence, int]]) -> None:
        for i in range(seq.num_forks):
            child = seq.fork(i + 1)
            self.blocks.fork(seq, child)
            child.status = RUNNING
            self.running.append(child)
            sampled.append((child, row))
        seq.num_forks = 0

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks back. What they held is computed again, less what the prefix cache still knows by then."""
        self.running.remove(seq)
        self.blocks.free(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._enqueue(seq)

    def _blocks_to_hold(self, seq: Sequence, finish: bool) -> int:
        """Blocks `seq` needs for the tokens it has, or (finish) at its end and with all siblings still to branch off.

        When blocks are not reserved, siblings may wait for one another, so only one of them has to fit.
        """
        if not finish:
            return self.blocks.blocks_for(seq.num_tokens)
        last = self.blocks.blocks_for(seq.num_tokens_to_finish)
        if self.config.admission != "reserve":
            return last
        shared = seq.num_prompt_tokens // self.blocks.block_size
        return last + seq.num_forks * (last - shared) + self.blocks.needs_copy(seq)

    def _count_admission(self, seq: Sequence) -> None:
        self.stats.prefix_query_tokens += seq.num_tokens
        self.stats.prefix_hit_tokens += seq.num_computed_tokens
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
