"""From a scheduling decision to the index arrays of one forward pass: a pure function, vectorised.

    scheduled        A: tokens 7..7     B: tokens 0..4
    input_ids        a7                 b0 b1 b2 b3 b4
    positions        7                  0  1  2  3  4
    query_start_loc  0                  1              6
    slot_mapping     block_table[row, position // block_size] * block_size + position % block_size

`[S]`, `[T]`, `[R]`: one entry a sequence, a token, a row of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch

from mini_engine.context_shard import ContextShard
from mini_engine.scheduler import SchedulerOutput


@dataclass(frozen=True)
class Batch:
    """What the model needs to know of one step. T tokens of S sequences, R rows of logits.

    input_ids, positions, slot_mapping [T] int64: each token, its place in its sequence, and its place in the KV pool.
    query_start_loc [S+1], seq_lens [S] int32: where the tokens of a sequence start, and its length after this step.
    block_table [S, longest] int32: block ids, padded with the null block.
    logits_indices [R] int64: the tokens whose successor is to be drawn.
    max_query_len, max_seq_len: largest entries, known without asking the device.
    num_decodes: that many sequences at the front have one token each.
    query_lens, context_lens: per sequence, new tokens and tokens before them, on the host.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    logits_indices: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`."""
        if device.type == "cpu":
            return self
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "torch.Tensor"}
        moved = {name: value.pin_memory().to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)


def build_batch(output: SchedulerOutput, block_size: int) -> Batch:
    """Index arrays for a step that has at least one scheduled sequence. block_size: the scheduler's, a virtual block
    where contexts are cut over ranks; slots are then those of virtual blocks, see `localize`."""
    scheduled = output.scheduled
    starts = np.fromiter((item.start for item in scheduled), np.int64, len(scheduled))
    lens = np.fromiter((item.num_tokens for item in scheduled), np.int64, len(scheduled))
    query_start_loc = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    seq_lens = starts + lens
    num_tokens = int(query_start_loc[-1])

    rows = np.repeat(np.arange(len(scheduled)), lens)
    positions = np.arange(num_tokens) - (query_start_loc[:-1] - starts)[rows]
    input_ids = np.fromiter(
        chain.from_iterable(item.seq.token_ids[item.start : item.start + item.num_tokens] for item in scheduled),
        np.int64,
        num_tokens,
    )
    max_seq_len = int(seq_lens.max())
    width = -(-max_seq_len // block_size)
    block_table = np.zeros((len(scheduled), width), np.int32)
    for row, item in enumerate(scheduled):
        table = item.seq.block_table[:width]
        block_table[row, : len(table)] = table
    slot_mapping = block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size

    sampled_rows = np.unique(np.fromiter((row for _, row in output.sampled), np.int64, len(output.sampled)))
    not_decodes = np.flatnonzero(lens != 1)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slot_mapping),
        query_start_loc=torch.from_numpy(query_start_loc),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_table=torch.from_numpy(block_table),
        logits_indices=torch.from_numpy(query_start_loc[1:][sampled_rows].astype(np.int64) - 1),
        max_query_len=int(lens.max()),
        max_seq_len=max_seq_len,
        num_decodes=int(not_decodes[0]) if len(not_decodes) else len(scheduled),
        query_lens=tuple(lens.tolist()),
        context_lens=tuple(starts.tolist()),
    )


def select_sequences(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch of some of its sequences, given in ascending order; it draws nothing."""
    query_lens, context_lens = (tuple(lens[row] for row in rows) for lens in (batch.query_lens, batch.context_lens))
    ends = np.cumsum(batch.query_lens)
    device = batch.input_ids.device
    picked = np.concatenate([np.arange(ends[row] - batch.query_lens[row], ends[row]) for row in rows])
    tokens, sequences = torch.from_numpy(picked).to(device), torch.tensor(rows, device=device)
    starts = torch.from_numpy(np.cumsum((0, *query_lens), dtype=np.int32)).to(device)
    return Batch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        slot_mapping=batch.slot_mapping[tokens],
        query_start_loc=starts,
        seq_lens=batch.seq_lens[sequences],
        block_table=batch.block_table[sequences],
        logits_indices=batch.logits_indices[:0],
        max_query_len=max(query_lens),
        max_seq_len=max(new + context for new, context in zip(query_lens, context_lens, strict=True)),
        num_decodes=sum(row < batch.num_decodes for row in rows),
        query_lens=query_lens,
        context_lens=context_lens,
    )


def localize(batch: Batch, shard: ContextShard, block_size: int) -> Batch:
    """The batch as a rank of a context-parallel group has it: slots in its own pool, -1 for other ranks' tokens."""
    if shard.size == 1:
        return batch
    return replace(batch, slot_mapping=torch.from_numpy(shard.local_slots(batch.slot_mapping.numpy(), block_size)))


def logits_rows(output: SchedulerOutput) -> list[int]:
    """For each of `output.sampled`, which row of the logits it draws from; siblings share one."""
    index = {row: i for i, row in enumerate(sorted({row for _, row in output.sampled}))}
    return [index[row] for _, row in output.sampled]
