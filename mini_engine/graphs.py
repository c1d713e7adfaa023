"""Decode steps replayed from CUDA graphs: the launches of a whole step recorded once per shape, then sent as one.

A graph replays fixed launches on fixed addresses, so a batch is padded to the next recorded shape and copied into its
buffers. Padding rows have no slot (-1: nothing is written), no key (length 0: nothing is read) and the null block.

    5 decodes, longest context 700    ->    8 rows, contexts up to 1024
    rows 5, 6, 7                            slot -1, length 0, block table 0 0 0 ...

Source: book 8.2.4 (shapes and padding), vLLM's cudagraph_capture_sizes for the ladder of sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mini_engine.batch import Batch

Run = Callable[[], torch.Tensor]
SHORTEST_CONTEXT = 1024


class Shape(NamedTuple):
    """Rows, and the longest context in tokens, that a recorded step can hold."""

    size: int
    context: int


class DecodeGraphs:
    """forward: runs the model on a batch that lies on the device and returns its logits.

    Shapes are recorded when first needed: the first step of a shape runs twice, later ones are replayed.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        capture: Callable[[Run], Run] | None = None,
    ):
        self.forward = forward
        self.block_size = block_size
        self.device = device
        self.capture = capture or CudaCapture()
        self.sizes = ladder_of_sizes(max_num_seqs)
        self.contexts = ladder_of_contexts(max_model_len)
        self._recorded: dict[Shape, tuple[Batch, Run]] = {}

    def shape_for(self, batch: Batch) -> Shape | None:
        """The smallest shape that holds the batch; None for one that does anything but decode."""
        size = bisect_left(self.sizes, len(batch.seq_lens))
        context = bisect_left(self.contexts, batch.max_seq_len)
        if batch.max_query_len > 1 or size == len(self.sizes) or context == len(self.contexts):
            return None
        return Shape(self.sizes[size], self.contexts[context])

    def run(self, batch: Batch, shape: Shape) -> torch.Tensor:
        """Logits [R, vocab] of a batch that lies on the host. Valid until the next step."""
        padded = pad_decodes(batch, shape, self.block_size)
        if shape not in self._recorded:
            buffers = padded.to(self.device)
            self._recorded[shape] = buffers, self.capture(lambda: self.forward(buffers))
        buffers, replay = self._recorded[shape]
        for field in fields(Batch):
            if field.type == "torch.Tensor":
                getattr(buffers, field.name).copy_(getattr(padded, field.name), non_blocking=True)
        logits = replay()
        return logits[batch.logits_indices.to(logits.device, non_blocking=True)]


def ladder_of_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then every 8, up to and with `max_num_seqs`."""
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*small, *range(8, max_num_seqs, 8), max_num_seqs]


def ladder_of_contexts(max_model_len: int) -> list[int]:
    """1024, 2048, 4096, … up to and with `max_model_len`."""
    contexts = []
    context = SHORTEST_CONTEXT
    while context < max_model_len:
        contexts.append(context)
        context *= 2
    return [*contexts, max_model_len]


def pad_decodes(batch: Batch, shape: Shape, block_size: int) -> Batch:
    """A batch of decodes with rows that compute nothing, up to `shape`. Every row yields logits."""
    rows = shape.size - len(batch.seq_lens)
    width = -(-shape.context // block_size)
    return Batch(
        input_ids=F.pad(batch.input_ids, (0, rows)),
        positions=F.pad(batch.positions, (0, rows)),
        slot_mapping=F.pad(batch.slot_mapping, (0, rows), value=-1),
        query_start_loc=torch.arange(shape.size + 1, dtype=torch.int32),
        seq_lens=F.pad(batch.seq_lens, (0, rows)),
        block_table=F.pad(batch.block_table, (0, width - batch.block_table.shape[1], 0, rows)),
        logits_indices=torch.arange(shape.size),
        max_query_len=1,
        max_seq_len=shape.context,
        num_decodes=shape.size,
        query_lens=(1,) * shape.size,
        context_lens=(shape.context - 1,) * shape.size,
    )


class CudaCapture:
    """Records what a function launches; returns what replays it. All recordings share one pool of memory, so a result
    is valid until the next replay of any of them."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # compiles kernels and fills caches, which a recording cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the calls of a copy thread beside it (pipeline.py) would otherwise end the recording
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay
