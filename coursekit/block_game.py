"""A referee that lets a student's functions play on a small KV pool and watches every move (exercise 8-3).

    play("allocate A 6; append A; fork A B; append B; free A", num_blocks=8, size=4, allocate=allocate, …)

The referee keeps a memory beside the pool: each slot remembers which token was written there. A wrong release or a
write into a shared block then shows as what it is in a real engine, another request's token in the context.

Rules (book 8.3.1, 8.3.2): a block is free when no table maps it and no submitted step uses it; a table has as many
blocks as its tokens need; a started block that others map too is copied before it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coursekit.checks import UNSOLVED, CheckFailed
from coursekit.compare import counted
from coursekit.game_pool import Pool, Token, changed, early, fault, snapshot
from coursekit.raised import raised, scope_of

# verb → what follows it
_MOVES = {
    "allocate": "REQUEST TOKENS",
    "append": "REQUEST",
    "fork": "PARENT CHILD",
    "free": "REQUEST",
    "submit": "",
    "abort": "REQUEST",
    "land": "",
}
_WITHOUT_A_BLOCK = {  # what a function does where the pool has no block for it
    "allocate": "Where there are too few free blocks, return False and change nothing.",
    "append": "Where a block is needed and none is free, return None and change nothing.",
}


class Referee:
    """Plays moves one by one and raises CheckFailed at the first that breaks a rule, with the moves that led there."""

    def __init__(self, num_blocks: int, size: int, functions: dict[str, Callable[..., Any]]):
        self.pool = Pool(num_blocks, size)
        self.functions = functions
        self.contexts: dict[str, list[Token]] = {}
        self.submitted: list[tuple[int, Token]] = []
        self.moves: list[str] = []
        self.copies = 0
        self.early = ""

    def play(self, script: str) -> list[list[Any]]:
        """For every move: [free blocks, copies so far, the tables with blocks numbered as they first appear]."""
        seen = []
        for move in filter(None, map(str.strip, script.split(";"))):
            self.moves.append(move)
            verb, names = self._read_move(move)
            getattr(self, f"_{verb}")(*names)
            self._inspect()
            seen.append(self._state())
            if not self.early and (blocks := early(self.pool)):
                self.early = f"{move}” put block {blocks[0]} into the free list while the submitted step still used it"
        if self.early:  # told at the end, so that the harm is told first where the moves show it
            self._fail(f"Released in flight: “{self.early}. No references is only half of the condition")
        return seen

    def _read_move(self, move: str) -> tuple[str, list[str]]:
        verb, *names = move.split()
        if verb not in _MOVES:
            self._fail(f"there is no move {verb!r}; there are {', '.join(_MOVES)}")
        if len(names) != len(_MOVES[verb].split()):
            self._fail(f"the move is written “{f'{verb} {_MOVES[verb]}'.strip()}”")
        if verb != "submit" and verb not in self.functions:
            self._fail(f"play was given no function for {verb}: add {verb}=… to the call")
        if verb == "allocate" and not (names[1].isdecimal() and int(names[1])):
            self._fail(f"{names[1]!r} is no number of tokens: a whole number of at least 1 belongs there")
        born = {"allocate": names[:1], "fork": names[1:]}.get(verb, [])
        for name in names if verb != "allocate" else names[:1]:
            if name in born and name in self.contexts:
                self._fail(f"there is a request {name} already")
            if name not in born and name not in self.contexts:
                self._fail(f"there is no request {name}: it was not admitted, or has ended")
        return verb, names

    def _allocate(self, request: str, tokens: str) -> None:
        count, room = int(tokens), len(self.pool.free) * self.pool.size
        before = snapshot(self.pool)
        done = self._call("allocate", request, count)
        if done is not (count <= room):
            wanted = f"{counted(count, 'token')}, room for {room}: it should return {count <= room}"
            self._fail(f"{self._name('allocate')} returned {done!r}; {wanted}")
        if not done:
            self._must_not_change(before, f"{self._name('allocate')} returned False")
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
        common = any(block in other for name, other in pool.tables.items() if name != request for block in table)
        fits = bool(pool.free) or not (opens or shared)
        self.copies += shared and fits
        before = snapshot(pool)
        slot, shown = self._call("append", request), self._name("append")
        if not fits:
            if slot is not None:
                self._fail(
                    f"{shown} returned {slot!r} although it needs a block and none is free: it should return None"
                )
            self._must_not_change(before, f"{shown} returned None, since it needs a block and none is free,")
            return
        self._must_know(request)
        why = "the shared tokens must come along"
        if pool.num_copies > self.copies:
            why = "nobody else maps this block"
            if common:
                why = "only the block that is written needs a copy; nobody writes into a full one, so it stays shared"
        self._check_tail(request, position, why)
        wanted = self._slot(request, position)
        if slot != wanted:
            self._fail(
                f"{shown} returned {slot!r}, but position {position} of {request} is slot {wanted}: block "
                f"{wanted // pool.size} × {pool.size} + {wanted % pool.size}"
            )
        self.contexts[request].append((request, position))
        pool.slots[wanted] = (request, position)

    def _check_tail(self, request: str, position: int, why: str) -> None:
        pool = self.pool
        i = position // pool.size
        if len(pool.tables[request]) <= i:
            has = counted(len(pool.tables[request]), "block")
            self._fail(f"the table of {request} has {has}: none for position {position}")
        block = pool.tables[request][i]
        others = [name for name, table in pool.tables.items() if name != request and block in table]
        if others:
            self._fail(
                f"write into a shared block: position {position} of {request} goes to block {block}, which {others[0]} "
                f"maps too. Their tokens would overwrite each other"
            )
        if pool.num_copies != self.copies:
            needed = f"{self.copies} {'is' if self.copies == 1 else 'are'} needed"
            self._fail(f"{counted(pool.num_copies, 'copy', 'copies')} so far, {needed}: {why}")

    def _must_not_change(self, before: Pool, what: str) -> None:
        found = changed(before, self.pool)
        if found:
            self._fail(f"{what} and should leave the pool exactly as it was, but {found}")

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
        self._read("Released in flight: its block went to the free list while the submitted step still used it")
        self.submitted = []
        self._call("land")
        if self.pool.in_flight:
            self._fail(f"the step has landed, and blocks {sorted(self.pool.in_flight)} are still in flight")

    def _name(self, verb: str) -> str:
        """The student's own name of the function that serves a move: append_cow for append."""
        return str(getattr(self.functions[verb], "__name__", verb))

    def _call(self, verb: str, *arguments: Any) -> Any:
        function, name = self.functions[verb], self._name(verb)
        short = not self.pool.free
        try:
            return function(self.pool, *arguments)
        except NotImplementedError as unsolved:
            line = str(unsolved) or "write your answer in its place"
            sentence = f"{UNSOLVED}: {name} still raises NotImplementedError ({line}). The notebook has a hint."
            raise CheckFailed(sentence) from None
        except Exception as error:
            empty = isinstance(error, IndexError) and (short or not self.pool.free)
            self._fail(f"{raised(name, error, scope_of(function))} {_WITHOUT_A_BLOCK.get(verb, '') if empty else ''}")

    def _sound(self) -> None:
        found = fault(self.pool)
        if found:
            self._fail(found)

    def _inspect(self) -> None:
        self._sound()
        for request, tokens in self.contexts.items():
            self._must_know(request)
            if self.pool.lengths[request] != len(tokens):
                has = counted(len(tokens), "token")
                self._fail(f"lengths[{request!r}] is {self.pool.lengths[request]}, {request} has {has}")
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

    def _state(self) -> list[Any]:
        names: dict[int, int] = {}
        tables = {
            request: [names.setdefault(block, len(names)) for block in table]
            for request, table in sorted(self.pool.tables.items())
        }
        return [len(self.pool.free), self.pool.num_copies, tables]

    def _fail(self, sentence: str) -> None:
        raise CheckFailed(f"After “{'; '.join(self.moves)}”: {sentence.strip().rstrip('.')}.") from None


def play(script: str, num_blocks: int, size: int, **functions: Callable[..., Any]) -> list[list[Any]]:
    """Let the functions play the script on a fresh pool. Raises CheckFailed at the first broken rule.

    Moves: allocate R TOKENS, append R, fork PARENT CHILD, free R, submit, abort R, land; separated by semicolons.
    """
    return Referee(num_blocks, size, functions).play(script)
