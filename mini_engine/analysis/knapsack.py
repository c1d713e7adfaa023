"""Which prefixes to keep in so many bytes: the best set, and the one that value per MiB picks (book 8.3.4).

Prefixes are taken to be independent: neither is the start of another, and each is used or not on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.analysis.reuse import KeptPrefix

MAX_SETS = 200_000
"""Most partial choices `best_kept` looks at."""


@dataclass(frozen=True)
class KeptSet:
    """A choice of prefixes, in the order they were given."""

    prefixes: tuple[KeptPrefix, ...]

    @property
    def num_bytes(self) -> int:
        return sum(prefix.num_bytes for prefix in self.prefixes)

    @property
    def value_s(self) -> float:
        """Expected seconds saved by all of them."""
        return sum(prefix.value_s for prefix in self.prefixes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(prefix.name for prefix in self.prefixes)


def greedy_kept(prefixes: Sequence[KeptPrefix], budget_bytes: int) -> KeptSet:
    """Take the highest value per MiB that still fits, again and again; nothing that saves no time.

    Best where prefixes may be cut anywhere. With whole ones a small dense prefix can block a large one that is worth
    more: see `greedy_gap_s`.
    """
    whole(0, budget_bytes=budget_bytes)
    left, taken = budget_bytes, set()
    for i in sorted(range(len(prefixes)), key=lambda i: -prefixes[i].value_s_per_mib):
        if prefixes[i].value_s > 0 and prefixes[i].num_bytes <= left:
            taken.add(i)
            left -= prefixes[i].num_bytes
    return _chosen(prefixes, taken)


def best_kept(prefixes: Sequence[KeptPrefix], budget_bytes: int) -> KeptSet:
    """The set of most expected saving that fits: a 0/1 knapsack, exact.

    Dynamic programming over the choices that no other beats in both bytes and value (Nemhauser and Ullmann 1969), so
    sizes need no common unit; what saves no time is beaten by leaving it out.
    Raises AnalysisError where more than MAX_SETS choices stay unbeaten: for small sets.
    """
    whole(0, budget_bytes=budget_bytes)
    unbeaten: list[tuple[int, float, frozenset[int]]] = [(0, 0.0, frozenset())]  # by bytes, and so by value
    for i, prefix in enumerate(prefixes):
        extended = (
            (size + prefix.num_bytes, value + prefix.value_s, chosen | {i})
            for size, value, chosen in unbeaten
            if size + prefix.num_bytes <= budget_bytes
        )
        unbeaten = _unbeaten([*unbeaten, *extended])
        if len(unbeaten) > MAX_SETS:
            raise AnalysisError(
                f"more than {MAX_SETS:,} choices among {len(prefixes)} prefixes stay open: ask for fewer prefixes, or "
                f"use greedy_kept"
            )
    return _chosen(prefixes, unbeaten[-1][2])


def greedy_gap_s(prefixes: Sequence[KeptPrefix], budget_bytes: int) -> float:
    """Expected seconds that ranking by value per MiB gives away against the best set; never below 0."""
    return best_kept(prefixes, budget_bytes).value_s - greedy_kept(prefixes, budget_bytes).value_s


def _unbeaten(choices: Iterable[tuple[int, float, frozenset[int]]]) -> list[tuple[int, float, frozenset[int]]]:
    kept: list[tuple[int, float, frozenset[int]]] = []
    for choice in sorted(choices, key=lambda choice: (choice[0], -choice[1])):
        if not kept or choice[1] > kept[-1][1]:
            kept.append(choice)
    return kept


def _chosen(prefixes: Sequence[KeptPrefix], indices: Iterable[int]) -> KeptSet:
    return KeptSet(tuple(prefixes[i] for i in sorted(indices)))
