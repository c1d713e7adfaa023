"""The small KV pool of exercise 8-3, and what must hold of it whoever works on it (book 8.3.1, 8.3.2)."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from coursekit.compare import counted

Token = tuple[str, int]  # who wrote it, at which position


@dataclass
class Pool:
    """Blocks and who maps them. `free` is given out from its front; where a freed block goes in it does not matter.

    refs: for each block, how many tables map it. tables, lengths: for each request, its blocks in order of position,
    and its tokens. in_flight: blocks that a submitted step still reads or writes. parked: blocks without references
    that wait for that step. slots: what each slot of the KV memory holds.
    """

    num_blocks: int
    size: int
    free: list[int] = field(default_factory=list)
    refs: list[int] = field(default_factory=list)
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    in_flight: set[int] = field(default_factory=set)
    parked: list[int] = field(default_factory=list)
    slots: list[Token | None] = field(default_factory=list)
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.free, self.refs = list(range(self.num_blocks)), [0] * self.num_blocks
        self.slots = [None] * (self.num_blocks * self.size)

    def copy(self, source: int, destination: int) -> None:
        """Copy what the slots of block `source` hold into block `destination`."""
        size = self.size
        self.slots[destination * size : (destination + 1) * size] = self.slots[source * size : (source + 1) * size]
        self.num_copies += 1


def snapshot(pool: Pool) -> Pool:
    """The pool as it is now, for `changed`."""
    return copy.deepcopy(pool)


def changed(before: Pool, pool: Pool) -> str:
    """The first thing that is not as it was, in a clause; "" where nothing changed. The order of `free` may differ."""
    for name in ("lengths", "tables"):
        old, new = getattr(before, name), getattr(pool, name)
        for request in {**old, **new}:
            if old.get(request) != new.get(request):
                return f"pool.{name}[{request!r}] was {old.get(request)} and is {new.get(request)}"
    for block, (then, now) in enumerate(zip(before.refs, pool.refs, strict=False)):
        if then != now:
            return f"pool.refs[{block}] was {then} and is {now}"
    if Counter(before.free) != Counter(pool.free):
        return f"pool.free was {sorted(before.free)} and is {sorted(pool.free)}"
    return ""


def fault(pool: Pool) -> str:
    """The first thing wrong with the pool, in a sentence; "" where all is well.

    Blocks in flight are looked at apart, by `early`: a release that comes too early does harm only later.
    """
    mapped: dict[int, list[str]] = {}
    for request, table in pool.tables.items():
        for block in table:
            if block not in range(pool.num_blocks):
                return f"the table of {request} maps {block!r}, which is no block: there are 0 to {pool.num_blocks - 1}"
            mapped.setdefault(block, []).append(request)
    for block, times in Counter(pool.free).items():
        if times > 1:
            return f"double free: block {block} is {times} times in the free list, so two requests will both get it"
        if block in mapped:
            return f"freed but mapped: block {block} is in the free list and still in the table of {mapped[block][0]}"
    for block in range(pool.num_blocks):
        users = mapped.get(block, [])
        if len(set(users)) < len(users):
            return f"block {block} is twice in the table of {users[0]}"
        if not users and block not in pool.free and block not in pool.parked:
            return f"leak: block {block} is in no table and not in the free list, so nobody will ever get it again"
        if not users and block in pool.parked and block not in pool.in_flight:
            why = "the step in flight does not use it" if pool.in_flight else "no step is in flight"
            return f"leak: block {block} is parked, although {why}"
        if pool.refs[block] != len(users):
            them = f"{counted(len(users), 'table')} {'maps' if len(users) == 1 else 'map'}"
            return f"wrong count: refs[{block}] is {pool.refs[block]}, but {them} block {block}"
    return _wrong_table(pool)


def early(pool: Pool) -> list[int]:
    """Blocks in the free list that a submitted step still uses."""
    return [block for block in pool.free if block in pool.in_flight]


def _wrong_table(pool: Pool) -> str:
    if set(pool.tables) != set(pool.lengths):
        return f"tables knows {sorted(pool.tables)}, lengths knows {sorted(pool.lengths)}"
    for request, table in pool.tables.items():
        tokens, needed = pool.lengths[request], -(-pool.lengths[request] // pool.size)
        if len(table) != needed:
            has, holds = counted(len(table), "block"), counted(tokens, "token")
            return f"the table of {request} has {has}; {holds} in blocks of {pool.size} need {needed}"
    return ""
