"""What the driver and the ranks say to each other arrives as it was sent."""

from __future__ import annotations

import os

import torch

from mini_engine.batch import Batch, build_batch
from mini_engine.errors import PoolTooSmall
from mini_engine.rank_messages import Answer, Step, pack, portable, unpack
from mini_engine.scheduler_output import ScheduledSequence, SchedulerOutput
from mini_engine.sequence import Sequence
from mini_engine.shared_logits import SharedLogits, anonymous_memory


def test_a_step_travels_without_its_sequences():
    seq = Sequence("a", [4, 5, 6, 7, 8])
    seq.block_table = [2, 3]
    output = SchedulerOutput(
        (ScheduledSequence(seq, 0, 5),),
        ((seq, 0),),
        (seq,),
        ((1, 2),),
        swap_out=((4, 0),),
        swap_in=((0, 5),),
        step=9,
    )
    batch = build_batch(output, 4)
    data = pack(Step.of(output, batch))
    step: Step = unpack(data)
    assert step.output == SchedulerOutput((), (), (), ((1, 2),), ((4, 0),), ((0, 5),), 9)
    there: Batch = step.unpacked()
    for name, value in vars(batch).items():
        other = getattr(there, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(other, value) and other.dtype == value.dtype, name
        else:
            assert other == value, name


def test_an_error_that_cannot_travel_comes_as_its_text():
    class Local(Exception):
        """Nobody on the other side knows it."""

    class Two(Exception):
        def __init__(self, a: int, b: int):
            super().__init__(f"{a} and {b}")

    error = portable(Local("lost"))
    assert type(error) is RuntimeError and str(error) == "Local: lost"
    assert str(portable(Two(1, 2))) == "Two: 1 and 2"
    assert isinstance(unpack(pack(Answer(error=portable(PoolTooSmall("small"))))).error, PoolTooSmall)


def test_shared_logits():
    fd = anonymous_memory(SharedLogits.num_bytes(4, 7))
    writer, reader = SharedLogits(fd, 4, 7), SharedLogits(fd, 4, 7)
    os.close(fd)
    first, second = torch.randn(3, 7), torch.randn(4, 7)
    read = reader.read(writer.write(first))
    assert writer.write(second) == 4
    assert torch.equal(read, first) and torch.equal(reader.read(4), second)
