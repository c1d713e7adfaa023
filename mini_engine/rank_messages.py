"""What the process of an engine and those of its ranks say to each other, and how it travels.

    driver → rank    RankSetup, then a Step for each step        end of file: exit
    rank → driver    an Answer to each: RankFigures, then how many rows of logits the step has

The logits themselves, the same on all ranks, lie in memory that rank 0 shares with the driver (shared_logits.py).

Messages are pickled here and sent as bytes: `Connection.send` would let torch share tensors by file descriptors. A
batch goes as NumPy arrays: 0.07 ms to pack and unpack, where that of its tensors took 0.9 ms.
"""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mini_engine.batch import Batch
from mini_engine.config import EngineConfig
from mini_engine.scheduler_output import SchedulerOutput


class RankSetup(NamedTuple):
    """What a process needs to become a rank. meeting_file: where the ranks find each other. num_threads: to compute.
    logits_fd: of the memory for logits."""

    config: EngineConfig
    rank: int
    device_type: str
    meeting_file: Path
    num_threads: int
    logits_fd: int


class RankFigures(NamedTuple):
    """What the driver keeps of a loaded rank, see `executor.Runner`."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weight_bytes: int
    kv_bytes: int


class Step(NamedTuple):
    """A scheduled step without its sequences, which stay with the scheduler. batch: the fields of a `Batch`."""

    output: SchedulerOutput
    batch: dict[str, Any]

    @classmethod
    def of(cls, output: SchedulerOutput, batch: Batch) -> Step:
        copies = output._replace(scheduled=(), sampled=(), preempted=())
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return cls(copies, {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in values.items()})

    def unpacked(self) -> Batch:
        values = self.batch.items()
        tensors: dict[str, Any] = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in values}
        return Batch(**tensors)


class Answer(NamedTuple):
    """Either an error or a value."""

    value: Any = None
    error: Exception | None = None


def pack(message: NamedTuple) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    return pickle.loads(data)


def portable(error: Exception) -> Exception:
    """The error itself where it can travel, else a RuntimeError with its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own pickling or constructor raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
