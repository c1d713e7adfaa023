"""A small KV pool that a student's functions work on, and a referee that watches every move (exercise 8-3).

    play("allocate A 6; append A; fork A B; append B; free A", num_blocks=8, size=4, allocate=allocate, …)

The referee keeps a memory beside the pool: each slot remembers which token was written there. A wrong release or a
write into a shared block then shows as what it is in a real engine, another request's token in the context.

Rules (book 8.3.1, 8.3.2): a block is free when no table maps it and no submitted step uses it; a table has as many
blocks as its tokens need; a started block that others map too is copied before it is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coursekit.checks import CheckFailed

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
            return f"leak: block {block} is still parked, although no step is in flight"
        if pool.refs[block] != len(users):
            return f"wrong count: refs[{block}] is {pool.refs[block]}, but {len(users)} tables map block {block}"
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
            size = pool.size
            return f"the table of {request} has {len(table)} blocks; {tokens} tokens in blocks of {size} need {needed}"
    return ""


class Referee:
    """Plays moves one by one and raises CheckFailed at the first that breaks a rule, with the moves that led there."""

    def __init__(self, num_blocks: int, size: int, functions: dict[str, Callable[..., Any]]):
        self.pool = Pool(num_blocks, size)
        self.functions = functions
        self.contexts: dict[str, list[Token]] = {}
        self.submitted: list[tuple[int, Token]] = []
        self.moves: list[str] = []
        self.copies = 0

    def play(self, script: str) -> list[list[Any]]:
        """For every move: [free blocks, copies so far, the tables with blocks numbered as they first appear]."""
        seen = []
        for move in filter(None, map(str.strip, script.split(";"))):
            self.moves.append(move)
            verb, *names = move.split()
            getattr(self, f"_{verb}")(*names)
            self._inspect()
            seen.append(self._state())
        if early(self.pool):
            self._fail(self._early_sentence())
        return seen

    def _allocate(self, request: str, tokens: str) -> None:
        count, room = int(tokens), len(self.pool.free) * self.pool.size
        done = self._call("allocate", request, count)
        if done is not (count <= room):
            self._fail(f"allocate returned {done!r}; {count} tokens, room for {room}: it should return {count <= room}")
        if done:
            self._must_know(request)
            self.contexts[request] = [(request, position) for position in range(count)]
            self._sound()
            for position, token in enumerate(self.contexts[request]):
                self.pool.slots[self._slot(request, position)] = token

    def _append(self, request: str) -> None:
        pool, position = self.pool, len(self.contexts[request])
        table = list(pool.tables[request])
        opens = position % pool.size == 0
        shared = not opens and sum(table[-1] in other for other in pool.tables.values()) > 1
        fits = bool(pool.free) or not (opens or shared)
        self.copies += shared and fits
        slot = self._call("append", request)
        if not fits:
            if slot is not None:
                self._fail(
                    f"append returned {slot!r} although it needs a block and none is free: it should return None"
                )
            return
        self._must_know(request)
        self._check_tail(request, position, shared)
        wanted = self._slot(request, position)
        if slot != wanted:
            self._fail(
                f"append returned {slot!r}, but position {position} of {request} is slot {wanted}: block "
                f"{wanted // pool.size} × {pool.size} + {wanted % pool.size}"
            )
        self.contexts[request].append((request, position))
        pool.slots[wanted] = (request, position)

    def _check_tail(self, request: str, position: int, shared: bool) -> None:
        pool = self.pool
        i = position // pool.size
        if len(pool.tables[request]) <= i:
            self._fail(f"the table of {request} has {len(pool.tables[request])} blocks: none for position {position}")
        block = pool.tables[request][i]
        others = [name for name, table in pool.tables.items() if name != request and block in table]
        if others:
            self._fail(
                f"write into a shared block: position {position} of {request} goes to block {block}, which {others[0]} "
                f"maps too. Their tokens would overwrite each other"
            )
        if pool.num_copies != self.copies:
            self._fail(
                f"{pool.num_copies} copies so far, {self.copies} needed: "
                + (
                    "nobody else maps this block"
                    if pool.num_copies > self.copies
                    else "the shared tokens must come along"
                )
            )

    def _fork(self, parent: str, child: str) -> None:
        free = len(self.pool.free)
        self._call("fork", parent, child)
        self._must_know(parent)
        self._must_know(child)
        self.contexts[child] = list(self.contexts[parent])
        if self.pool.tables[child] is self.pool.tables[parent]:
            self._fail(f"{parent} and {child} have one and the same list as table: the child needs a list of its own")
        if len(self.pool.free) != free or self.pool.tables[child] != self.pool.tables[parent]:
            self._fail("fork shares every block of the parent and takes none from the free list")

    def _free(self, request: str, verb: str = "free") -> None:
        self._call(verb, request)
        if request in self.pool.tables or request in self.pool.lengths:
            self._fail(f"{request} has ended, and tables or lengths still know it")
        del self.contexts[request]

    def _abort(self, request: str) -> None:
        self._free(request, "abort")

    def _submit(self) -> None:
        """A step is given to the machine: it will read every context and write the newest token of each."""
        self.pool.in_flight = {block for table in self.pool.tables.values() for block in table}
        self.submitted = [(self._slot(name, len(tokens) - 1), tokens[-1]) for name, tokens in self.contexts.items()]

    def _land(self) -> None:
        """The submitted step is done: what it wrote is there now, wherever its blocks have gone meanwhile."""
        for slot, token in self.submitted:
            self.pool.slots[slot] = token
        self._read(self._early_sentence())
        self.submitted = []
        self._call("land")
        if self.pool.in_flight:
            self._fail(f"the step has landed, and blocks {sorted(self.pool.in_flight)} are still in flight")

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return self.functions[name](self.pool, *arguments)
        except NotImplementedError as unsolved:
            line = str(unsolved) or "write your answer in its place"
            sentence = f"Not solved yet: {name} still raises NotImplementedError ({line}); hints are below."
            raise CheckFailed(sentence) from None
        except Exception as error:
            self._fail(f"{name} raised {type(error).__name__}: {error}")

    def _sound(self) -> None:
        found = fault(self.pool)
        if found:
            self._fail(found)

    def _inspect(self) -> None:
        self._sound()
        for request, tokens in self.contexts.items():
            self._must_know(request)
            if self.pool.lengths[request] != len(tokens):
                self._fail(f"lengths[{request!r}] is {self.pool.lengths[request]}, {request} has {len(tokens)} tokens")
        self._read()

    def _read(self, why: str = "") -> None:
        for request, tokens in self.contexts.items():
            for position, token in enumerate(tokens):
                held = self.pool.slots[self._slot(request, position)]
                if held != token:
                    what = "nothing" if held is None else f"token {held[1]} of {held[0]}"
                    self._fail(f"{request} reads {what} at position {position}, where token {token[1]} belongs. {why}")

    def _must_know(self, request: str) -> None:
        if request not in self.pool.tables or request not in self.pool.lengths:
            self._fail(f"tables and lengths must both know {request}")

    def _slot(self, request: str, position: int) -> int:
        return self.pool.tables[request][position // self.pool.size] * self.pool.size + position % self.pool.size

    def _early_sentence(self) -> str:
        return (
            "Released in flight: a block went to the free list while the submitted step still used it. No references "
            "is only half of the condition"
        )

    def _state(self) -> list[Any]:
        names: dict[int, int] = {}
        tables = {
            request: [names.setdefault(block, len(names)) for block in table]
            for request, table in sorted(self.pool.tables.items())
        }
        return [len(self.pool.free), self.pool.num_copies, tables]

    def _fail(self, sentence: str) -> None:
        raise CheckFailed(f"After “{'; '.join(self.moves)}”: {sentence.strip().rstrip('.')}.") from None


def play(
    script: str,
    num_blocks: int,
    size: int,
    earlier: Mapping[str, Callable[[], Any]] | None = None,
    **functions: Callable[..., Any],
) -> list[list[Any]]:
    """Let the functions play the script on a fresh pool. Raises CheckFailed at the first broken rule.

    Moves: allocate R TOKENS, append R, fork PARENT CHILD, free R, submit, abort R, land; separated by semicolons.
    earlier: an earlier part of the exercise → a play of its own moves. Where that fails, it is what the message says.
    """
    try:
        return Referee(num_blocks, size, functions).play(script)
    except CheckFailed as failed:
        for part, replay in (earlier or {}).items():
            try:
                replay()
            except CheckFailed as first:
                raise CheckFailed(f"Part {part} does not pass yet: mend it first. {first}") from None
        raise failed from None
