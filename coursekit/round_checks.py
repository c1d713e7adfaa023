"""What exercise 8-2 b says of three rounds: the first thing that is wrong in them, and nothing of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coursekit.checks import CheckFailed, expect
from coursekit.compare import counted, plain

Round = Sequence[Sequence[int]]  # (new tokens, history) of each request in it
_HISTORY = {
    1: "This looks like: the token drawn last counts as cached already, and it is the one being computed.",
    -1: "This looks like: the token that the round before computed is left out; it is in the cache by now.",
}


def check_rounds(name: str, got: Callable[[], Any], wanted: Sequence[Round], titles: Sequence[str], hint: str) -> None:
    """Raises CheckFailed at the first property of a round that is not as in `wanted`.

    titles: what each round is, for the sentence. The order of the requests in a round is free.
    """
    came: list[Any] = []
    expect(f"the number of rounds in {name}", lambda: _kept(came, got), len(wanted), mistakes={}, hint=hint)
    for number, (title, mine, right) in enumerate(zip(titles, came, wanted, strict=True), 1):
        found = _wrong(mine, right)
        if found:
            raise CheckFailed(f"{name}, round {number} ({title}): {found} {hint}")


def _kept(came: list[Any], got: Callable[[], Any]) -> int:
    value = plain(got())
    if not isinstance(value, (list, tuple)):
        raise CheckFailed(f"A list of rounds should come, and a {type(value).__name__} came. Is a `return` missing?")
    if value and all(_is_entry(entry) for entry in value):
        raise CheckFailed("A single round came, a list of (new, history): return all the rounds, in a list.")
    came[:] = value
    return len(came)


def _is_entry(entry: Any) -> bool:
    numbers = isinstance(entry, (list, tuple)) and len(entry) == 2
    return numbers and all(isinstance(number, int) for number in entry)


def _wrong(mine: Any, right: Round) -> str:
    if not isinstance(mine, (list, tuple)) or not all(_is_entry(entry) for entry in mine):
        return "it should be a list with one (new, history) for each request in it."
    if len(mine) < len(right):
        return f"it has {counted(len(mine), 'entry', 'entries')}. This looks like: a request of the round is missing."
    if len(mine) > len(right):
        return f"it has {counted(len(mine), 'entry', 'entries')}: one or more too many."
    for (new, history), (tokens, before) in zip(_ordered(mine), _ordered(right), strict=True):
        if new != tokens:
            return (
                f"somebody computes {counted(new, 'token')} in it, which is too {'many' if new > tokens else 'few'}: "
                "a decode computes one, and this policy computes a prompt in one go."
            )
        if history != before:
            known = f" {_HISTORY[history - before]}" if history - before in _HISTORY else ""
            return f"of the {new} new, the history {history} is too {'high' if history > before else 'low'}.{known}"
    return ""


def _ordered(entries: Round) -> list[Sequence[int]]:
    return sorted(entries, key=lambda entry: (entry[0], entry[1]))
