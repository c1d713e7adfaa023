"""The Triton backend of attention: made once a step from its batch, called once a layer, like `TorchAttention`.

    query_lens   1 1 1 5 1 | 512 | 1 1        neighbours of one kind share a launch:
    launches     short     | long | short     at most SHORT_QUERY new tokens, and more

A sequence's kind depends on its own new tokens alone, so its result never depends on its batch-mates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import groupby
from typing import NamedTuple

import torch

from mini_engine.attention import AttentionState
from mini_engine.batch import Batch
from mini_engine.kernels.paged_attention import paged_attention
from mini_engine.kernels.tiles import SHORT_QUERY
from mini_engine.ops import Contexts


class Run(NamedTuple):
    """Sequences seqs.start..seqs.stop of the batch, their tokens, and bounds of both, known on the host."""

    seqs: slice
    tokens: slice
    max_query_len: int
    max_seq_len: int


class TritonAttention:
    """Paged attention of one batch. out_dtype: float32, or the model's own to save a conversion."""

    def __init__(self, batch: Batch, scale: float, out_dtype: torch.dtype = torch.float32):
        self.batch, self.scale, self.out_dtype = batch, scale, out_dtype
        self.runs = split_runs(batch.query_lens, batch.context_lens)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> AttentionState:
        """q [T, heads, D], caches of one layer; the new tokens' K and V are already in them."""
        batch = self.batch
        out = torch.empty(q.shape, dtype=self.out_dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for run in self.runs:
            paged_attention(
                q[run.tokens],
                k_cache,
                v_cache,
                batch.query_start_loc[run.seqs.start : run.seqs.stop + 1],
                batch.seq_lens[run.seqs],
                batch.block_table[run.seqs],
                self.scale,
                run.max_query_len,
                run.max_seq_len,
                out=out[run.tokens],
                lse=lse[run.tokens],
            )
        return AttentionState(out, lse)


def split_runs(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    kind: Callable[[int], Hashable] = lambda length: length <= SHORT_QUERY,
) -> list[Run]:
    """Neighbouring sequences of one kind, in order. kind: of a sequence, by its number of new tokens."""
    runs, first_seq, first_token = [], 0, 0
    for _, group in groupby(query_lens, key=kind):
        lens = list(group)
        seqs = slice(first_seq, first_seq + len(lens))
        tokens = slice(first_token, first_token + sum(lens))
        longest = max(context + new for context, new in zip(context_lens[seqs], lens, strict=True))
        runs.append(Run(seqs, tokens, max(lens), longest))
        first_seq, first_token = seqs.stop, tokens.stop
    return runs


def rows_of(contexts: Contexts) -> Batch:
    """Contexts that all new tokens of a sequence see whole, as a batch of rows of their own: each the last token of a
    sequence as long as the context. Such a row sees nothing where the context is empty."""
    counts = torch.tensor(contexts.query_lens)
    lens = torch.tensor(contexts.lens).repeat_interleave(counts)
    table = contexts.block_table
    device, num_rows = table.device, len(lens)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Batch(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        seq_lens=lens.int().to(device),
        block_table=table.repeat_interleave(counts.to(device), dim=0),
        logits_indices=nothing,
        max_query_len=1,
        max_seq_len=int(lens.max()),
        num_decodes=num_rows,
        query_lens=(1,) * num_rows,
        context_lens=tuple((lens - 1).tolist()),
    )
