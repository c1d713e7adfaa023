"""A group whose ranks are processes: the collectives of groups.py over torch.distributed.

Ranks meet in one of two ways: by what torchrun puts into the environment, or at a file of this machine, where an engine
starts its ranks itself.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mini_engine.groups import Group, GroupError


class TorchGroup(Group):
    """A rank in a process of its own, over torch.distributed: gloo on CPUs, NCCL on GPUs.

    process_group: None is the default one. A rank that never comes makes the others raise after its time limit.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._process_group = process_group

    @classmethod
    def from_environment(cls, backend: str | None = None, timeout_s: float = 300.0) -> TorchGroup:
        """Join the group that torchrun describes in the environment, or be in the one that was joined before.

        backend: None is NCCL where there is a GPU. Under NCCL this process gets the GPU of its local rank.
        """
        if not dist.is_initialized():
            backend = backend or backend_of("cuda" if torch.cuda.is_available() else "cpu")
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            if backend == "gloo":
                atexit.register(_leave)  # a rank that had not left was seen to abort as it ended
        return cls()

    @classmethod
    def at_file(cls, path: Path, rank: int, size: int, device_type: str, timeout_s: float = 1800.0) -> TorchGroup:
        """Join `size` processes of this machine that meet at a file none of them has made yet. timeout_s: a rank may
        load that much longer than another."""
        timeout, where = timedelta(seconds=timeout_s), f"file://{path}"
        dist.init_process_group(backend_of(device_type), init_method=where, rank=rank, world_size=size, timeout=timeout)
        return cls()

    def split(self, size: int) -> TorchGroup:
        if size < 1 or self.size % size:
            raise GroupError(f"{self.size} ranks cannot be split into groups of {size}")
        members = dist.get_process_group_ranks(self._process_group or dist.group.WORLD)
        first = self.rank // size * size
        return TorchGroup(dist.new_group(members[first : first + size], use_local_synchronization=True))

    # As bytes: gloo does not move every dtype, and nothing is added on the way.

    def _gather(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        sent = _as_bytes(x)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with self._peers(name):
            dist.all_gather(received, sent, group=self._process_group)
        return [part.view(x.dtype).view(x.shape) for part in received]

    def _swap(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = torch.cat([_as_bytes(part) for part in parts])
        received = torch.empty_like(sent)
        with self._peers(name):
            dist.all_to_all_single(received, sent, group=self._process_group)
        return [part.view(parts[0].dtype).view(parts[0].shape) for part in received.chunk(self.size)]

    @contextmanager
    def _peers(self, name: str) -> Iterator[None]:
        """What goes wrong in here is other ranks' doing: they ended, or called something else."""
        try:
            yield
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} in {name}: {' '.join(str(error).split())}") from error


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_of(device_type: str) -> str:
    """torch.distributed's backend for tensors on such devices."""
    return "nccl" if device_type == "cuda" else "gloo"


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)
