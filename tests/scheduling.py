"""Run a scheduler without a model: made-up tokens, and a memory that remembers what was written where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mini_engine.batch import Batch, build_batch
from mini_engine.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from mini_engine.sequence import SamplingParams, Sequence

Draw = Callable[[Sequence], int]


def make_scheduler(**settings: Any) -> Scheduler:
    """A scheduler with room for everything but what the test sets."""
    return Scheduler(SchedulerConfig(**{"max_model_len": 1 << 20, **settings}))


def sequence(name: str, prompt: Iterable[int], max_tokens: int = 16, **fields: Any) -> Sequence:
    """A request; `n`, `min_tokens` and `stop_token_ids` go to its SamplingParams, the rest to the sequence."""
    own = {key: fields.pop(key) for key in ("n", "min_tokens", "stop_token_ids", "ignore_eos") if key in fields}
    return Sequence(name, list(prompt), SamplingParams(max_tokens=max_tokens, **own), **fields)


def unrelated(index: int, length: int) -> range:
    """Prompts that share nothing: each index has a million tokens of its own."""
    return range(index * 1_000_000, index * 1_000_000 + length)


def step(scheduler: Scheduler, draw: Draw = lambda seq: -1) -> SchedulerOutput:
    """One step; each sampled sequence gets `draw(seq)`."""
    output = scheduler.schedule()
    scheduler.update(output, [draw(seq) for seq, _ in output.sampled])
    return output


def run(
    scheduler: Scheduler, draw: Draw = lambda seq: -1, memory: ShadowMemory | None = None, max_steps: int = 100_000
) -> list[SchedulerOutput]:
    """Step until nothing is left, checking the blocks (and, if given, the memory) on the way."""
    outputs: list[SchedulerOutput] = []
    while scheduler.has_unfinished():
        assert len(outputs) < max_steps, f"not finished after {max_steps} steps: {scheduler.running}"
        output = scheduler.schedule()
        assert output.scheduled, f"an idle step while {scheduler.num_waiting} wait and {scheduler.running} run"
        if memory is not None:
            memory.forward(output)
        scheduler.update(output, [draw(seq) for seq, _ in output.sampled])
        scheduler.check()
        outputs.append(output)
    return outputs


def lengths(output: SchedulerOutput) -> dict[str, int]:
    """What each request computes in this step."""
    return {item.seq.request_id: item.num_tokens for item in output.scheduled}


def free_queue(scheduler: Scheduler) -> list[int]:
    """Free blocks, the next to be given out first."""
    return [block.block_id for block in scheduler.blocks.pool.free_blocks()]


class ShadowMemory:
    """The KV pool with names instead of numbers: a slot holds the name of the salt and all tokens up to its own.

    `forward` does what a model does with a step: copies, writes, then reads of every context. A slot that does not
    hold the reader's own prefix was reused too early, not copied before it was written, or found by mistake.

    For a step in flight, call `swap` when it has been scheduled and `build` when it is submitted: that is how early a
    copy from the host may be done, and how early the engine reads the block tables.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0):
        self.block_size = block_size
        self.slots = [-1] * (num_blocks * block_size)
        self.host = [[-1] * block_size for _ in range(num_host_blocks)]
        self._names: dict[object, int] = {}
        self._prefixes: dict[Sequence, list[int]] = {}

    def build(self, output: SchedulerOutput) -> Batch:
        return build_batch(output, self.block_size)

    def forward(self, output: SchedulerOutput, batch: Batch | None = None) -> None:
        """batch: of a step whose swaps are done already."""
        if batch is None:
            self.swap(output)
            batch = self.build(output)
        self._copy(output)
        slots, first = batch.slot_mapping.tolist(), 0
        assert len(set(slots)) == len(slots), f"two tokens of one step go to the same slot: {slots}"
        for seq, start, num_tokens in output.scheduled:
            for position in range(start, start + num_tokens):
                assert slots[first] >= self.block_size, f"{seq} writes into the null block"
                self.slots[slots[first]] = self._prefix(seq, position)
                first += 1
        for row, (seq, start, num_tokens) in enumerate(output.scheduled):
            table = batch.block_table[row].tolist()
            for position in range(start + num_tokens):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                assert self.slots[slot] == self._prefix(seq, position), (
                    f"{seq} reads at position {position} (block {slot // self.block_size}) what is not its own prefix"
                )

    def fail(self, output: SchedulerOutput, batch: Batch | None = None, ahead: SchedulerOutput | None = None) -> None:
        """The step died half way: what it was to write is rubbish, as is what the step `ahead` was to copy out."""
        if batch is None:
            self.swap(output)
            batch = self.build(output)
        self._copy(output)
        for slot in batch.slot_mapping.tolist():
            self.slots[slot] = -1
        for _, slot in (*output.swap_out, *(ahead.swap_out if ahead is not None else ())):
            self.host[slot] = [-1] * self.block_size

    def swap(self, output: SchedulerOutput) -> None:
        size = self.block_size
        for block, slot in output.swap_out:
            self.host[slot] = self.slots[block * size : block * size + size]
        for slot, block in output.swap_in:
            self.slots[block * size : block * size + size] = self.host[slot]

    def _copy(self, output: SchedulerOutput) -> None:
        size = self.block_size
        content = [self.slots[source * size : source * size + size] for source, _ in output.block_copies]
        for (_, destination), block in zip(output.block_copies, content, strict=True):
            self.slots[destination * size : destination * size + size] = block

    def _prefix(self, seq: Sequence, position: int) -> int:
        """A number for the tokens up to `position` and the salt; equal if and only if those are."""
        prefixes = self._prefixes.setdefault(seq, [])
        for token in seq.token_ids[len(prefixes) : position + 1]:
            content = (prefixes[-1] if prefixes else seq.cache_salt, token)
            prefixes.append(self._names.setdefault(content, len(self._names)))
        return prefixes[position]
