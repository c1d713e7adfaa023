"""`build_batch` against a loop that does one token after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.batch import build_batch, logits_rows
from mini_engine.scheduler import ScheduledSequence, SchedulerOutput
from tests.scheduling import make_scheduler, sequence, unrelated


@st.composite
def outputs(draw: st.DrawFn) -> tuple[SchedulerOutput, int]:
    """Any step: shuffled blocks, more of them than needed, tokens left over, siblings drawing from one row."""
    block_size = draw(st.integers(1, 5))
    lens = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=6))
    ids = iter(draw(st.permutations(range(1, 150))))
    items, sampled = [], []
    for row, (start, num_tokens, rest) in enumerate(lens):
        seq = sequence(str(row), unrelated(row, start + num_tokens + rest))
        seq.block_table = [next(ids) for _ in range(-(-seq.num_tokens // block_size))]
        items.append(ScheduledSequence(seq, start, num_tokens))
        if rest == 0:
            sampled += [(seq, row)] * draw(st.sampled_from([1, 1, 3]))
    draw(st.randoms(use_true_random=False)).shuffle(sampled)
    return SchedulerOutput(tuple(items), tuple(sampled), (), ()), block_size


@given(outputs())
def test_against_a_loop(case):
    output, size = case
    ids, positions, slots, starts, ends = [], [], [], [0], []
    for seq, start, num_tokens in output.scheduled:
        for position in range(start, start + num_tokens):
            ids.append(seq.token_ids[position])
            positions.append(position)
            slots.append(seq.block_table[position // size] * size + position % size)
        starts.append(len(ids))
        ends.append(start + num_tokens)
    batch = build_batch(output, size)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start_loc.tolist() == starts
    assert batch.seq_lens.tolist() == ends
    assert batch.max_seq_len == max(ends)
    assert batch.query_lens == tuple(item.num_tokens for item in output.scheduled)
    assert batch.context_lens == tuple(item.start for item in output.scheduled)
    assert batch.max_query_len == max(batch.query_lens)
    for row, (seq, _, _) in enumerate(output.scheduled):
        width = -(-max(ends) // size)
        assert batch.block_table[row].tolist() == (seq.block_table + [0] * width)[:width]
    decodes = 0
    while decodes < len(batch.query_lens) and batch.query_lens[decodes] == 1:
        decodes += 1
    assert batch.num_decodes == decodes


@given(outputs())
def test_each_sampled_sequence_finds_its_row_of_logits(case):
    output, size = case
    batch = build_batch(output, size)
    rows = logits_rows(output)
    assert len(rows) == len(output.sampled)
    for (seq, scheduled), row in zip(output.sampled, rows, strict=True):
        token = int(batch.logits_indices[row])
        assert token == int(batch.query_start_loc[scheduled + 1]) - 1
        assert int(batch.input_ids[token]) == seq.token_ids[-1]
    assert len(batch.logits_indices) == len({row for _, row in output.sampled})


def test_dtypes():
    scheduler = make_scheduler()
    scheduler.add(sequence("r", [3, 4], 2))
    batch = build_batch(scheduler.schedule(), 16)
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(batch, name).dtype == torch.int32, name
    assert batch.to(torch.device("cpu")) is batch
    with pytest.raises(AttributeError):
        batch.max_seq_len = 1  # type: ignore[misc]


def test_a_batch_stays_true_while_its_sequences_move_on():
    scheduler = make_scheduler()
    seq = sequence("r", [3, 4, 5], 4)
    scheduler.add(seq)
    output = scheduler.schedule()
    before = build_batch(output, 16)
    scheduler.update(output, [9])
    after = build_batch(output, 16)
    assert before.input_ids.tolist() == after.input_ids.tolist() == [3, 4, 5]
    assert before.slot_mapping.tolist() == after.slot_mapping.tolist() == [16, 17, 18]


@pytest.mark.gpu
def test_moving_to_a_gpu():
    scheduler = make_scheduler()
    scheduler.add(sequence("r", range(40), 2))
    batch = build_batch(scheduler.schedule(), 16)
    moved = batch.to(torch.device("cuda"))
    for name in ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        assert getattr(moved, name).is_cuda and torch.equal(getattr(moved, name).cpu(), getattr(batch, name))
    assert moved.query_lens == batch.query_lens
