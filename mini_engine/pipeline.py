"""One step in flight while the next is scheduled: a thread that computes, and one that moves blocks to the host.

    caller     schedule 2 │ wait for 1, sample, update │ submit 2 │ text of 1 │ schedule 3 │ …
    compute    step 1 ────────────┘                    └ step 2 ────────────────────────────── …
    link       copies of 2 ──┘                                                   copies of 3 …

Each thread takes its work in the order of submission, like a stream of a GPU. A step waits for its own copies, and they
may run beside the step before: only blocks that no submitted step uses are given out (`BlockManager.in_flight`).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from mini_engine.batch import Batch
from mini_engine.runner import ModelRunner
from mini_engine.scheduler_output import SchedulerOutput


class Flight(NamedTuple):
    """A submitted step. Its logits are there when it has landed: every read and write of the step is done."""

    output: SchedulerOutput
    logits: Future[torch.Tensor]


class Pipeline:
    """Runs steps of one ModelRunner beside the caller."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self._compute = ThreadPoolExecutor(1, "compute")
        self._link = ThreadPoolExecutor(1, "link")
        self._copies: Future[None] | None = None
        self._stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None

    def start_copies(self, output: SchedulerOutput) -> None:
        """Begin to move what the step swaps, before its turn. `submit` of the same step comes next, or `settle`."""
        if output.swap_out or output.swap_in:
            self._copies = self._link.submit(self._move, output)

    def submit(self, output: SchedulerOutput) -> Flight:
        """Send a step on its way. Its tokens are all known; the batch is built now, before the sequences move on."""
        if self._copies is None:
            self.start_copies(output)
        batch = self.runner.prepare(output)
        copies, self._copies = self._copies, None
        return Flight(output, self._compute.submit(self._run, output, batch, copies))

    def settle(self, flight: Flight | None) -> None:
        """Wait until nothing runs any more, whatever came of it."""
        running: list[Future[Any]] = [flight.logits] if flight else []
        wait(running + ([self._copies] if self._copies else []))
        self._copies = None

    def _move(self, output: SchedulerOutput) -> None:
        with torch.cuda.stream(self._stream):  # None, on a CPU: does nothing
            self.runner.swap(output)
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self, output: SchedulerOutput, batch: Batch, copies: Future[None] | None) -> torch.Tensor:
        if copies is not None:
            copies.result()
        logits = self.runner.run(output, batch)
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return logits
