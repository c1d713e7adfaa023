"""Belady's rule: what a cache that knows the future would hit, as a bound for those that do not.

Of all that is there, give up what is wanted again last; what comes in may be given up at once. No policy finds more
blocks where all take the same space and count the same (Belady 1966; passing by is allowed here). It is a bound on hits
only: where blocks differ in size, or cost differently to compute, fewer hits may save more time. And it counts blocks
one by one, though a prefix is found only up to its first missing block: a policy may be unable to reach it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def belady_hits(requests: Sequence[Sequence[int]], num_blocks: int) -> list[int]:
    """Blocks found by each request, given the keys of the blocks it wants, in a cache of `num_blocks`."""
    next_use = _next_uses(requests)
    cached: set[int] = set()
    furthest: list[tuple[float, int]] = []  # (−next use, key); those whose time has passed lie behind all others
    found = []
    position = 0
    for keys in requests:
        hits = 0
        for key in keys:
            if key in cached:
                hits += 1
                cached.remove(key)
            again = next_use[position]
            position += 1
            if again == math.inf or not num_blocks:
                continue
            cached.add(key)
            heapq.heappush(furthest, (-again, key))
            if len(cached) > num_blocks:
                cached.remove(heapq.heappop(furthest)[1])
        found.append(hits)
    return found


def _next_uses(requests: Sequence[Sequence[int]]) -> list[float]:
    """For each use, in order, the place of the next use of the same key."""
    flat = [key for keys in requests for key in keys]
    following: dict[int, int] = {}
    uses = [math.inf] * len(flat)
    for place in range(len(flat) - 1, -1, -1):
        uses[place] = following.get(flat[place], math.inf)
        following[flat[place]] = place
    return uses
