"""A group of ranks that compute together, and the collectives by which they exchange tensors.

    all_gather(x [..., n, ...], dim)       every rank gets all parts, in rank order, along dim     [..., N n, ...]
    reduce_scatter(x [..., N n, ...], dim) rank r gets the sum over ranks of part r               [..., n, ...]
    all_to_all(x [N, ...])                 x[j] goes to rank j; result[j] is what rank j sent      [N, ...]
    all_reduce(x)                          every rank gets the sum over ranks                      as x

Each rank runs the same code on its own `Group`. `LocalGroup` runs all ranks in one process, a thread each, and says who
did what when they fall out of step; `TorchGroup` is torch.distributed. Every collective leaves a record of the bytes
that this rank receives from others (it sends as many). A group of one rank moves nothing and records nothing.

Sums are float32 and in rank order, whatever travels, so that both kinds of group agree to the last bit. NCCL's own
reduce-scatter would add in the dtype that travels; the bytes are the same.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from mini_engine.errors import EngineError

T = TypeVar("T")
RECORDS_KEPT = 10_000


class GroupError(EngineError):
    """Ranks that fell out of step: one ended, or they called different collectives."""


class Collective(NamedTuple):
    """One collective as one rank sees it. num_bytes: received from other ranks."""

    name: str
    num_bytes: int


class Group(ABC):
    """One rank's view of a group.

    records: its last collectives, in order; an engine that runs for days must not keep them all. num_bytes: received
    from other ranks since the beginning.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.records: deque[Collective] = deque(maxlen=RECORDS_KEPT)
        self.num_bytes = 0

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if self.size == 1:
            return x
        return torch.cat(self._received("all_gather", self._gather("all_gather", x)), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Float32. Raises GroupError where the ranks do not divide the dimension."""
        if self.size == 1:
            return x.float()
        self._check_divides(x.shape[dim])
        return self._sum(self._received("reduce_scatter", self._swap("reduce_scatter", x.chunk(self.size, dim))))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ...]. Raises GroupError unless there is one part a rank."""
        if x.shape[0] != self.size:
            raise GroupError(f"all_to_all needs one part for each of {self.size} ranks, got {x.shape[0]}")
        if self.size == 1:
            return x
        return torch.stack(self._received("all_to_all", self._swap("all_to_all", x.unbind(0))))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In x's dtype: a reduce-scatter of equal parts, then an all-gather of the sums, as rings do it."""
        if self.size == 1:
            return x
        flat = x.flatten()
        part = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, part * self.size - len(flat)))
        addends = self._swap("all_reduce", padded.chunk(self.size))
        sums = self._gather("all_reduce", self._sum(addends).to(x.dtype))
        self._received("all_reduce", addends, sums)
        return torch.cat(sums)[: len(flat)].view(x.shape)

    @abstractmethod
    def split(self, size: int) -> Group:
        """The group of `size` neighbouring ranks that this one is in, with records of its own. All ranks must call it.
        Raises GroupError where `size` does not divide the group."""

    @abstractmethod
    def _gather(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank had, in rank order, equal in shape. name: the collective it is part of."""

    @abstractmethod
    def _swap(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """parts[j] goes to rank j; returns what each rank had for this one, in rank order, equal in shape."""

    def _received(self, name: str, *transfers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Note a collective and what came in it from other ranks; returns its last transfer."""
        num_bytes = sum(x.nbytes for parts in transfers for i, x in enumerate(parts) if i != self.rank)
        self.records.append(Collective(name, num_bytes))
        self.num_bytes += num_bytes
        return transfers[-1]

    @staticmethod
    def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float().clone()
        for part in parts[1:]:
            total += part.float()
        return total

    def _check_divides(self, number: int) -> None:
        if number % self.size:
            raise GroupError(f"{number} entries cannot be dealt out evenly to {self.size} ranks")


class _Call(NamedTuple):
    signature: tuple[Any, ...]
    parts: Sequence[torch.Tensor]


class _World:
    """What the ranks of one process share. ended: ranks whose work is over, and how, in this run."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended: dict[int, str] = {}
        self.meetings: dict[tuple[int, ...], _Meeting] = {}

    def meeting(self, members: tuple[int, ...]) -> _Meeting:
        with self.changed:
            return self.meetings.setdefault(members, _Meeting(self, members))

    def end(self, rank: int, how: str) -> None:
        with self.changed:
            self.ended[rank] = how
            self.changed.notify_all()

    def restart(self) -> None:
        with self.changed:
            self.ended.clear()
            for meeting in self.meetings.values():
                meeting.waiting = {}


class _Meeting:
    """Where some ranks meet: each brings its call, and leaves with everyone's once all are there."""

    def __init__(self, world: _World, members: tuple[int, ...]):
        self.world = world
        self.members = members
        self.waiting: dict[int, _Call] = {}
        self.met: dict[int, _Call] = {}
        self.num_meetings = 0

    def meet(self, rank: int, call: _Call) -> dict[int, _Call]:
        changed = self.world.changed
        with changed:
            number = self.num_meetings
            self.waiting[rank] = call
            if len(self.waiting) == len(self.members):
                # Nobody can be back here before all have left with this one, so that one place for it is enough.
                self.met, self.waiting = self.waiting, {}
                self.num_meetings += 1
                changed.notify_all()
            changed.wait_for(lambda: self.num_meetings > number or self._missing())
            if self.num_meetings == number:
                gone = "; ".join(f"rank {other} {how}" for other, how in self._missing().items())
                raise GroupError(f"rank {rank} waits in {call.signature[0]}, but {gone}")
            met = self.met
        if len({other.signature for other in met.values()}) > 1:
            calls = ", ".join(f"rank {other} {_shown(met[other])}" for other in self.members)
            raise GroupError(f"ranks met with different calls: {calls}")
        return met

    def _missing(self) -> dict[int, str]:
        return {r: how for r, how in self.world.ended.items() if r in self.members and r not in self.waiting}


def _shown(call: _Call) -> str:
    name, *shapes = call.signature
    return f"{name} of {shapes[0]}"


class LocalGroup(Group):
    """A rank in a process that holds all of them. Made by `create`, run by `run_ranks`."""

    def __init__(self, world: _World, members: tuple[int, ...], rank: int):
        super().__init__(rank, len(members))
        self._world = world
        self._members = members
        self._meeting = world.meeting(members)

    @classmethod
    def create(cls, size: int) -> list[LocalGroup]:
        """The groups of all `size` ranks, in rank order."""
        world = _World()
        return [cls(world, tuple(range(size)), rank) for rank in range(size)]

    @property
    def world_rank(self) -> int:
        return self._members[self.rank]

    def split(self, size: int) -> LocalGroup:
        if size < 1 or self.size % size:
            raise GroupError(f"{self.size} ranks cannot be split into groups of {size}")
        first = self.rank // size * size
        return LocalGroup(self._world, self._members[first : first + size], self.rank - first)

    def _gather(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        return self._meet(name, [x.detach().clone()] * self.size)

    def _swap(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._meet(name, [x.detach().clone() for x in parts])

    def _meet(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """parts: copies, since who receives one may read it when this rank has long gone on to change its own."""
        signature = (name, *((tuple(x.shape), str(x.dtype)) for x in parts))
        met = self._meeting.meet(self.world_rank, _Call(signature, parts))
        return [met[other].parts[self.rank] for other in self._members]


def run_ranks(groups: Sequence[LocalGroup], work: Callable[[LocalGroup], T]) -> list[T]:
    """Run `work` once a rank, each in a thread, and return the results in rank order.

    groups: all of one `LocalGroup.create`. Gradient and inference mode are the caller's. A rank that fails or ends
    early ends the others at their next collective; raised is the first error that is not such a consequence.
    """
    world = groups[0]._world
    world.restart()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def one(group: LocalGroup) -> T:
        how = "has ended"
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return work(group)
        except BaseException as error:
            how = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            world.end(group.world_rank, how)

    with ThreadPoolExecutor(len(groups)) as pool:
        futures: list[Future[T]] = [pool.submit(one, group) for group in groups]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, GroupError)), errors[0])
    return [future.result() for future in futures]
