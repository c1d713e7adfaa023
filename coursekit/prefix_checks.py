"""The checks of exercise 8-4 f: sets of prefixes `(name, mib, value_ms)`, reckoned with the course's own analysis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mini_engine.analysis as book
from coursekit.checks import CheckFailed, expect
from coursekit.compare import plain

Prefix = tuple[str, float, float]
MOST = 5
_HINT = "A small prefix with the highest value per MiB must leave a hole that the large one does not fit into."


def priced(prefixes: Sequence[Prefix]) -> list[book.KeptPrefix]:
    """The same prefixes as the analysis wants them: each value without any chance in it."""
    return [
        book.KeptPrefix(name, round(mib * book.MiB), 1.0, max(0.0, value / 1e3), 0.0, max(0.0, -value / 1e3))
        for name, mib, value in prefixes
    ]


def names_kept(
    rule: Callable[[Sequence[book.KeptPrefix], int], book.KeptSet], prefixes: Sequence[Prefix], budget_mib: float
) -> list[str]:
    """Sorted names of what `rule` (best_kept, greedy_kept) keeps in so many MiB."""
    return sorted(rule(priced(prefixes), round(budget_mib * book.MiB)).names)


def given_away_ms(prefixes: Sequence[Prefix], budget_mib: float) -> float:
    """Milliseconds that "most value per MiB first" saves less than the best set."""
    return book.greedy_gap_s(priced(prefixes), round(budget_mib * book.MiB)) * 1e3


def is_counterexample(made: Any) -> bool:
    """Whether `made` is an answer as asked for on which the simple rule loses."""
    made = plain(made)
    return not _malformed(made) and given_away_ms(*made) > 1e-6


def check_counterexample(came: Callable[[], Any]) -> None:
    """Raise CheckFailed, with what is wrong with it, unless `came()` is a counterexample."""

    def loses() -> bool:
        made = plain(came())
        reason = _malformed(made)
        if reason:
            raise CheckFailed(reason)
        return is_counterexample(made)

    mistakes = {"the simple rule finds the best set of your example, too": False}
    expect("by_density saves less than best_set on counterexample()", loses, True, mistakes=mistakes, hint=_HINT)


def _malformed(made: Any) -> str:
    two = isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], (tuple, list))
    if not two or not _number(made[1]) or not all(_is_prefix(prefix) for prefix in made[0]):
        return "counterexample() must return two things, a list of (name, mib, value_ms) and a budget."
    prefixes, budget = made
    if len(prefixes) > MOST:
        return f"counterexample() has {len(prefixes)} prefixes; at most {MOST} are allowed."
    if any(round(mib * book.MiB) < 1 for _, mib, _ in prefixes):
        return "counterexample(): each prefix needs a size above 0 MiB."
    return "counterexample(): the budget cannot be below 0 MiB." if budget < 0 else ""


def _is_prefix(prefix: Any) -> bool:
    three = isinstance(prefix, (tuple, list)) and len(prefix) == 3
    return three and _number(prefix[1]) and _number(prefix[2])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
