"""A runner whose ranks are processes of their own, started here: gloo between CPUs, NCCL between GPUs.

The driver holds no rank: it schedules, sends every rank the step's index arrays, and draws from the logits that rank 0
leaves in memory they share. On a CPU the ranks share out the threads that this process may use; on GPUs rank r has
device r, and the logits come to the host.

What a step costs beside its collectives, measured on two busy cores: 0.1 ms to pack and unpack the arrays (20 KB for 64
decodes, 0.5 MB for 256 with contexts of 512 blocks), the way there and back, and the copies of the logits.

A rank that raises or dies ends all of them: the others may be anywhere between two collectives, and no message brings
them back in step. An interrupt (Ctrl-C) does not: the step that is under way is waited for.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from mini_engine import sizing
from mini_engine.batch import build_batch
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import EngineConfig
from mini_engine.groups import GroupError
from mini_engine.rank_messages import RankFigures, RankSetup, Step
from mini_engine.rank_processes import RankProcesses, RanksFailed
from mini_engine.scheduler_output import SchedulerOutput
from mini_engine.shared_logits import SharedLogits, anonymous_memory

INTERRUPTED_STEP_S = 10.0
SIGNAL_S = 1.0  # a signal that comes just before a wait is seen after it


class ProcessRunner:
    """See executor.Runner. Raises, while loading, what a rank raises; GroupError when a process ends."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.config = config
        size = config.tensor_parallel_size
        sizing.resolve_max_model_len(config, checkpoint.config)  # its refusal, before there is a process
        self.device = sizing.resolve_device(config.device)
        threads = max(1, torch.get_num_threads() // size)
        self._ended = ""
        room = (config.max_num_seqs, checkpoint.config.vocab_size)
        fd = anonymous_memory(SharedLogits.num_bytes(*room))
        try:
            self._logits = SharedLogits(fd, *room)
            self._processes = RankProcesses(size, _environment(threads), [fd])
        finally:
            os.close(fd)
        # Messages are read and written by a thread of its own, where no interrupt can cut one in two.
        self._messenger = ThreadPoolExecutor(1, "messenger")
        meeting = self._processes.directory / "meeting"
        setups = [RankSetup(config, rank, self.device.type, meeting, threads, fd) for rank in range(size)]
        try:
            figures: RankFigures = self._ask(*setups)[0]
        except RanksFailed as failed:
            self._end(str(failed))
            raise failed.failure.error or failed from None
        except BaseException:
            self.close()
            raise
        self.num_blocks, self.num_host_blocks = figures.num_blocks, figures.num_host_blocks
        self.max_model_len, self.dtype, self.kv_dtype = figures.max_model_len, figures.dtype, figures.kv_dtype
        self.weight_bytes, self.kv_bytes = figures.weight_bytes, figures.kv_bytes

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid for process in self._processes.processes]

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """As `ModelRunner.execute`; logits on the CPU. Raises GroupError when a rank fails, and from then on."""
        step = Step.of(output, build_batch(output, self.config.virtual_block_size))
        try:
            return self._logits.read(self._ask(step)[0])
        except RanksFailed as failed:
            self._end(str(failed))
            raise GroupError(f"{failed}. All ranks were ended: make a new engine") from failed.failure.error
        except KeyboardInterrupt:
            self._interrupted()
            raise

    def close(self) -> None:
        """End all ranks. Also done when nobody refers to this runner any more, and at the end of the interpreter."""
        self._end("the engine was closed")

    def _ask(self, *messages: Any) -> list[Any]:
        """Send all ranks one message, or each its own; their answers."""
        if self._ended:
            raise GroupError(f"the ranks have ended ({self._ended}): make a new engine")
        asked = self._messenger.submit(_exchange, self._processes, messages)
        while not asked.done():
            wait([asked], SIGNAL_S)
        return asked.result()

    def _interrupted(self) -> None:
        """Let the step come to its end, so that the next one finds the ranks in step; if that takes long, end them."""
        idle = self._messenger.submit(int)  # its turn comes when all before it is over
        try:
            wait([idle], INTERRUPTED_STEP_S)
        finally:
            if not idle.done():
                self._end(f"interrupted in a step that took longer than {INTERRUPTED_STEP_S:.0f} s")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._processes.end()
        self._messenger.shutdown()


def _exchange(processes: RankProcesses, messages: tuple[Any, ...]) -> list[Any]:
    processes.send(*messages)
    return processes.answers()


def _environment(threads: int) -> dict[str, str]:
    """How a rank's environment differs from ours."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # The model has been downloaded by now: all ranks are to read the very files that are here.
        "HF_HUB_OFFLINE": "1",
        # The ranks are on this machine: no name is looked up, and nobody outside can connect.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
