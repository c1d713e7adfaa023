"""In which order free blocks that hold a known prefix are given out: the eviction policies of the prefix cache.

    lru     the one whose last use lies furthest back                           (vLLM's order, the default, O(1))
    fifo    the one that came free first, however often it was used since
    lfu     the one found least often; among equals the least recently used
    value   the one whose loss costs least: chance of reuse × seconds saved     (V_h of book 8.3.4)

Every clock here counts events. Blocks without a hash are no business of a policy: the pool gives them out first.
All blocks take the same bytes, so value per byte and value order them alike.

Source: book 8.3.4 (admission, eviction, swap, recompute are four decisions; this is the second).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from mini_engine.block import Block, BlockList
from mini_engine.errors import ConfigError
from mini_engine.popularity import Popularity

POLICIES = ("lru", "fifo", "lfu", "value")
Saving = Callable[[int], float]
"""Seconds that finding a block saves, by its place in the prefix (0 is the first block)."""


class EvictionPolicy(Protocol):
    """What the pool tells a policy and asks of it. A block passed in has its hash.

    learns: False for one that need not be told of `remembered`, `hit` and `forgotten`, which saves their calls.
    """

    learns: bool

    def remembered(self, block: Block) -> None:
        """The block, still in use, has become findable."""

    def hit(self, block: Block) -> None:
        """A request found the block and references it."""

    def forgotten(self, block: Block) -> None:
        """The block is about to lose its hash: it was given out, or the cache is emptied."""

    def add(self, block: Block) -> None:
        """Nobody needs the block any more: it may be given out."""

    def remove(self, block: Block) -> None:
        """The block is in use again."""

    def pop(self) -> Block | None:
        """The next block to give out, which is no longer free then; None where there is none."""

    def __contains__(self, block: Block) -> bool: ...

    def __iter__(self) -> Iterator[Block]:
        """All blocks it has, the next to be given out first."""


class LRU:
    """The order in which blocks came free. A sequence frees its last block first, so a prefix is lost from its end."""

    learns = False

    def __init__(self) -> None:
        self._queue = BlockList()
        self.add = self._queue.append
        self.remove = self._queue.remove
        self.pop = self._queue.pop

    def remembered(self, block: Block) -> None: ...

    def hit(self, block: Block) -> None: ...

    def forgotten(self, block: Block) -> None: ...

    def __contains__(self, block: Block) -> bool:
        return block.next_free is not None

    def __iter__(self) -> Iterator[Block]:
        return iter(self._queue)


class _Ranked:
    """Free blocks in a heap by `rank`. A block that left the queue, or changed rank, leaves its old entry behind."""

    learns = True

    def __init__(self) -> None:
        self._ranks: dict[Block, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], int, Block]] = []
        self._ticks = 0

    def rank(self, block: Block) -> tuple[float, ...]:
        """The lowest goes first; among equals the one that was ranked first."""
        raise NotImplementedError

    def remembered(self, block: Block) -> None: ...

    def hit(self, block: Block) -> None: ...

    def forgotten(self, block: Block) -> None: ...

    def add(self, block: Block) -> None:
        self._ticks += 1
        rank = self._ranks[block] = (*self.rank(block), self._ticks)
        heapq.heappush(self._heap, (rank, block.block_id, block))
        if len(self._heap) > 2 * len(self._ranks) + 64:  # mostly left-behind entries
            self._heap = [(rank, block.block_id, block) for block, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, block: Block) -> None:
        del self._ranks[block]

    def pop(self) -> Block | None:
        while self._ranks:
            rank, _, block = heapq.heappop(self._heap)
            if self._ranks.get(block) == rank:
                del self._ranks[block]
                return block
        return None

    def __contains__(self, block: Block) -> bool:
        return block in self._ranks

    def __iter__(self) -> Iterator[Block]:
        return iter(sorted(self._ranks, key=self._ranks.__getitem__))


class FIFO(_Ranked):
    """The order in which blocks came free for the first time since they were computed: reuse earns no longer life."""

    def __init__(self) -> None:
        super().__init__()
        self._entered: dict[Block, int] = {}

    def rank(self, block: Block) -> tuple[float, ...]:
        return (self._entered.setdefault(block, self._ticks),)

    def forgotten(self, block: Block) -> None:
        self._entered.pop(block, None)


class LFU(_Ranked):
    """Fewest hits first. What was popular once stays: a count never fades while the block is cached."""

    def __init__(self) -> None:
        super().__init__()
        self._hits: dict[Block, int] = {}

    def rank(self, block: Block) -> tuple[float, ...]:
        return (self._hits.get(block, 0),)

    def hit(self, block: Block) -> None:
        self._hits[block] = self._hits.get(block, 0) + 1

    def forgotten(self, block: Block) -> None:
        self._hits.pop(block, None)


class Value(_Ranked):
    """Least expected saving first, p_h · (T_r − T_f) of book 8.3.4, and never a block before those that build on it.

    p_h is taken to be proportional to the uses of the block's prefix, fading over `half_life` uses of blocks
    (`Popularity`); it outlives the block, so that a prefix that comes back is known. saving: T_r − T_f of one block.
    A later block costs more to recompute, yet without the one before it cannot be found: hence the second rule.
    T_m is left out: a block that stays where it is costs nothing to maintain.
    """

    def __init__(self, half_life: float, saving: Saving):
        super().__init__()
        self.popularity = Popularity(half_life, max_keys=max(64, math.ceil(4 * half_life)))
        self.saving = saving
        self._log_saving: dict[int, float] = {}  # by depth
        self._children: dict[Hashable, int] = {}  # known blocks by what they build on
        self._free: dict[Hashable, Block] = {}

    def rank(self, block: Block) -> tuple[float, ...]:
        key, depth = _key(block), block.depth
        if depth not in self._log_saving:
            saving = self.saving(depth)
            self._log_saving[depth] = math.log2(saving) if saving > 0 else -math.inf
        return (self._children.get(key, 0) > 0, self.popularity.log_score(key) + self._log_saving[depth])

    def remembered(self, block: Block) -> None:
        parent = block.parent_hash
        self._children[parent] = self._children.get(parent, 0) + 1
        self._rank_again(parent)
        self.popularity.use(_key(block))

    def hit(self, block: Block) -> None:
        self.popularity.use(_key(block))

    def forgotten(self, block: Block) -> None:
        parent = block.parent_hash
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._rank_again(parent)

    def add(self, block: Block) -> None:
        super().add(block)
        self._free[_key(block)] = block

    def remove(self, block: Block) -> None:
        super().remove(block)
        del self._free[_key(block)]

    def pop(self) -> Block | None:
        block = super().pop()
        if block is not None:
            del self._free[_key(block)]
        return block

    def _rank_again(self, key: Hashable) -> None:
        """The block of that hash, if it is free, has gained its first or lost its last known child."""
        if (block := self._free.get(key)) is not None:
            super().add(block)


def make_policy(
    name: str, num_blocks: int, saving: Saving | None = None, half_life: float | None = None
) -> EvictionPolicy:
    """The policy of that name for a pool of `num_blocks`. Raises ConfigError.

    saving, half_life: of `Value`. None: every block saves alike; a use's weight halves while as many blocks are used as
    the pool holds, a rule that only a trace can better.
    """
    if name == "lru":
        return LRU()
    if name == "fifo":
        return FIFO()
    if name == "lfu":
        return LFU()
    if name == "value":
        return Value(num_blocks if half_life is None else half_life, saving or _alike)
    raise ConfigError(f"eviction_policy must be one of {', '.join(POLICIES)}, got {name!r}")


def _alike(depth: int) -> float:
    return 1.0


def _key(block: Block) -> int:
    assert block.block_hash is not None, "a policy is only told of blocks with a hash"
    return block.block_hash
