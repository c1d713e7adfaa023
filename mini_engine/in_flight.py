"""Which steps are in flight, and what may be scheduled behind one before its tokens are known.

A sequence that draws a token in the step in flight counts it as pending: the next step gets the token's position and
block, and only the value comes later. What needs the value, the content hash of a block, waits for it.
"""

from __future__ import annotations

from mini_engine.block_manager import BlockManager
from mini_engine.scheduler_output import SchedulerOutput
from mini_engine.sequence import Sequence, SequenceStatus


class StepsInFlight:
    """step, landed: numbers of the last step scheduled and of the last one whose tokens came in.

    starved: a sequence found no block while a step was in flight, so that this one must land first: whoever is
        preempted must be at rest.
    """

    def __init__(self) -> None:
        self.step = self.landed = 0
        self.starved = False
        self._last: SchedulerOutput | None = None
        self._expecting = False

    def computes(self, seq: Sequence) -> bool:
        """Whether a step in flight still reads or writes the blocks of `seq`."""
        return seq.last_step > self.landed

    def expect_tokens(self) -> bool:
        """Before a step is scheduled: whether another is in flight. If so, its sequences count the tokens it draws,
        but for a last one, which is never computed. Raises RuntimeError with two steps in flight."""
        if self.step == self.landed:
            self.starved = False
            return False
        if self.step > self.landed + 1:
            raise RuntimeError(f"steps {self.landed + 1} and {self.step} are in flight: update() or undo() the first")
        assert self._last is not None
        for seq, _ in self._last.sampled:
            if seq.status is SequenceStatus.RUNNING and seq.num_output_tokens + 1 < seq.max_tokens:
                seq.num_pending_tokens = 1
        self._expecting = True
        return True

    def add(self, output: SchedulerOutput) -> None:
        """The step has been scheduled; one with nothing to do does not count."""
        if output.scheduled:
            self._last = output
        else:
            self.step -= 1

    def land(self, output: SchedulerOutput) -> None:
        """The step has been computed."""
        if output.scheduled:
            self.landed = output.step

    def learn_tokens(self, output: SchedulerOutput, blocks: BlockManager) -> None:
        """The tokens of `output` are known now: so are the blocks that the step behind it fills with them."""
        if not self._expecting:
            return
        self._expecting = False
        for seq, _ in output.sampled:
            seq.num_pending_tokens = 0
            filled, rest = divmod(len(seq.token_ids), blocks.block_size)
            if rest == 0 and seq.num_computed_tokens == len(seq.token_ids) and seq.status is SequenceStatus.RUNNING:
                blocks.cache_full_blocks(seq, filled - 1, filled)

    def land_all(self) -> None:
        """Nothing is in flight any more: the steps failed."""
        self.landed, self._expecting = self.step, False
