"""The sequences that wait, best rank first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mini_engine.sequence import Sequence, SequenceStatus


class RequestQueue:
    """A heap by rank. A sequence that ends while it waits is dropped on its way out, so that an abort costs nothing.

    policy: "priority" ranks by priority before arrival, "fcfs" by arrival alone.
    """

    def __init__(self, policy: str):
        self._by_priority = policy == "priority"
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        return (entry[-1] for entry in self._heap if entry[-1].status is SequenceStatus.WAITING)

    def rank(self, seq: Sequence) -> tuple[int, int, int]:
        """Who goes first: the lowest priority value, then the earliest arrival. The last in rank is preempted."""
        return (seq.priority if self._by_priority else 0, seq.arrival, seq.index)

    def push(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heapq.heappush(self._heap, (*self.rank(seq), seq))
        self._num_waiting += 1

    def first(self) -> Sequence:
        """The one to be admitted next; there must be one."""
        while self._heap[0][-1].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Sequence:
        """`first()`, taken out."""
        seq = self.first()
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return seq

    def remove(self, seq: Sequence) -> None:
        """`seq`, which waits, is about to end."""
        self._num_waiting -= 1
