"""What a started process runs: one rank of a tensor-parallel group, told what to do over a socket.

`python -m mini_engine.rank_worker FD`; the messages are those of rank_messages.py. A thread reads them, so that the end
of the driver, however it comes, ends this process at once, also while it computes or waits in a collective.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from mini_engine.errors import EngineError
from mini_engine.rank_messages import Answer, RankFigures, RankSetup, Step, pack, portable, unpack
from mini_engine.runner import ModelRunner
from mini_engine.shared_logits import SharedLogits
from mini_engine.torch_group import TorchGroup
from mini_engine.weights import open_checkpoint


class Rank:
    """One rank: loaded, then run step by step. Both raise what a ModelRunner raises."""

    def __init__(self, setup: RankSetup):
        self.setup = setup

    def load(self) -> RankFigures:
        """Join the group and read this rank's part of the model."""
        setup = self.setup
        torch.set_num_threads(setup.num_threads)
        if setup.device_type == "cuda":
            torch.cuda.set_device(setup.rank)
        size = setup.config.tensor_parallel_size
        group = TorchGroup.at_file(setup.meeting_file, setup.rank, size, setup.device_type)
        with open_checkpoint(setup.config.model) as checkpoint:
            self.runner = ModelRunner(setup.config, checkpoint, group)
            vocab_size = checkpoint.config.vocab_size
        self.logits = SharedLogits(setup.logits_fd, setup.config.max_num_seqs, vocab_size)
        return RankFigures(*(getattr(self.runner, name) for name in RankFigures._fields))

    def run(self, step: Step) -> int:
        """R. Rank 0 leaves the logits [R, vocab] for the driver; the others have the same."""
        self.runner.swap(step.output)
        logits = self.runner.run(step.output, step.unpacked())
        return self.logits.write(logits) if self.setup.rank == 0 else len(logits)


def answer(work: Callable[[], Any]) -> Answer:
    """What `work` returns or raises. An error that nobody foresaw brings its traceback along, as a note."""
    try:
        return Answer(work())
    except EngineError as error:
        return Answer(error=portable(error))
    except Exception as error:
        sent = portable(error)
        sent.add_note(traceback.format_exc())
        return Answer(error=sent)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    setup: RankSetup = unpack(connection.recv_bytes())
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox, setup.meeting_file.parent), daemon=True).start()
    rank = Rank(setup)
    connection.send_bytes(pack(answer(rank.load)))
    while True:
        connection.send_bytes(pack(answer(partial(rank.run, unpack(inbox.get())))))


def _read(connection: Connection, inbox: SimpleQueue[bytes], directory: Path) -> None:
    """directory: the driver's own, which a driver that was killed could not remove."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main()
