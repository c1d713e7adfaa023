"""The checks of parts b to f of exercise 8-3: scripts played with whatever functions the notebook has by then.

    check_moves("c", globals(), [("allocate A 3; append A", 4, 4)])        scripts with num_blocks and size

A part is played with the functions of all parts up to it. Where it fails, the parts before it are tried on moves of
their own, and the first that fails is what is to be mended first: also one whose function is missing altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from coursekit.block_game import play
from coursekit.checks import CheckFailed, expect, mend_first, uses

# part → {move: the function that serves it from this part on}
_SERVED: dict[str, dict[str, str]] = {
    "b": {"allocate": "allocate"},
    "c": {"append": "append"},
    "d": {"fork": "fork", "free": "free"},
    "e": {"append": "append_cow"},
    "f": {"abort": "abort", "land": "land"},
}
# part → moves that tell whether it works: (script, num_blocks, size)
_TRIED = {
    "b": ("allocate A 8; allocate B 9; allocate C 1", 4, 4),
    "c": ("allocate A 3; append A; append A", 2, 4),
    "d": ("allocate A 5; fork A B; free A; free B; allocate C 8", 2, 4),
    "e": ("allocate A 3; fork A B; append A; append B", 2, 4),
}
Space = Mapping[str, Any]


def check_moves(part: str, space: Space, scripts: Iterable[tuple[str, int, int]]) -> None:
    """Play the scripts with the functions in `space`, the notebook's globals(). Raises CheckFailed at the first fault.

    scripts: (moves as `play` takes them, blocks of the pool, slots of a block).
    """
    try:
        for script, num_blocks, size in scripts:
            play(script, num_blocks, size, **functions(part, space))
    except CheckFailed as failed:
        for name, attempt in _earlier(part, space).items():
            try:
                attempt()
            except CheckFailed as first:
                raise mend_first(name, first) from None
        raise failed from None


def functions(part: str, space: Space) -> dict[str, Callable[..., Any]]:
    """Move → the function that serves it in this part. Raises CheckFailed for one that is not there."""
    names: dict[str, str] = {}
    for earlier, served in _SERVED.items():
        names |= served if earlier <= part else {}
    missing = [name for name in names.values() if not callable(space.get(name))]
    if missing:
        raise CheckFailed(
            f"There is no function {missing[0]}: run its answer cell, see that it raises no error, and keep the name."
        )
    return {move: space[name] for move, name in names.items()}


def _earlier(part: str, space: Space) -> dict[str, Callable[[], Any]]:
    tried: dict[str, Callable[[], Any]] = {}
    if any(uses(space.get(name), "slot_of") for served in _SERVED.values() for name in served.values()):
        tried["a"] = partial(_slot, space)
    for name, (script, num_blocks, size) in _TRIED.items():
        if name < part:
            tried[name] = partial(check_moves, name, space, [(script, num_blocks, size)])
    return tried


def _slot(space: Space) -> None:
    if not callable(space.get("slot_of")):
        raise CheckFailed("There is no function slot_of: run its answer cell, and keep the name.")
    expect("slot_of([2, 0, 3], 3, size=4)", lambda: space["slot_of"]([2, 0, 3], 3, 4), 11)
    expect("slot_of([2, 0, 3], 8, size=4)", lambda: space["slot_of"]([2, 0, 3], 8, 4), 12)
