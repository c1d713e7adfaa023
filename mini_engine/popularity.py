"""How often a prefix has been used lately, and how likely it is to be wanted again. The clock counts uses, not seconds.

Each use counts 1 when it happens and half as much every `half_life` uses (of anything) later. Kept as a logarithm,

    log2(sum of 2^(t_i / half_life)),

which stays the same while a prefix is not used: a whole queue ordered by it needs no re-sorting as time goes by.

Source: LRFU (Lee et al., IEEE Transactions on Computers 2001), which lies between LFU (no decay) and LRU (all decay).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from mini_engine.errors import ConfigError

NEVER = -math.inf


class Popularity:
    """Decayed counts of uses by key. Remembers the `max_keys` to `2 * max_keys` most popular ones."""

    def __init__(self, half_life: float, max_keys: int):
        if not half_life > 0 or max_keys < 1:
            raise ConfigError(f"half_life must be above 0 uses and max_keys at least 1, got {half_life} and {max_keys}")
        self.half_life = half_life
        self.max_keys = max_keys
        self.clock = 0
        self._log: dict[int, float] = {}
        self._again: set[int] = set()

    def __len__(self) -> int:
        return len(self._log)

    def use(self, key: int) -> None:
        """One more use of `key`, one tick later than the last."""
        self.clock += 1
        new, old = self.clock / self.half_life, self._log.get(key, NEVER)
        self._log[key] = max(new, old) + math.log2(1 + 2 ** -abs(new - old))
        if old != NEVER:
            self._again.add(key)
        if len(self._log) > 2 * self.max_keys:
            self._prune()

    def log_score(self, key: int) -> float:
        """What the order of keys goes by; −inf for one that is not remembered."""
        return self._log.get(key, NEVER)

    def count(self, key: int) -> float:
        """Uses of `key`, each worth half after `half_life` ticks."""
        return 2 ** (self.log_score(key) - self.clock / self.half_life)

    def used_again(self, key: int) -> bool:
        """Whether `key` was used more than once, however long ago, as far as that is remembered."""
        return key in self._again

    def _prune(self) -> None:
        best = sorted(self._log.items(), key=lambda item: item[1], reverse=True)
        self._log = dict(best[: self.max_keys])
        self._again.intersection_update(self._log)


class ReturnEstimate:
    """p_h, learned: of the prefixes that were given up with about so many uses, the share that was wanted again.

    Uses are decayed counts; counts within a factor of two share a class. A class nobody has been in yet is taken to
    return every second time. What was given up longer ago than the last `max_keys` counts as not wanted again.
    """

    def __init__(self, max_keys: int):
        self.max_keys = max_keys
        self._given_up: OrderedDict[int, int] = OrderedDict()  # key → class, the oldest first
        self._chances: dict[int, int] = {}
        self._returns: dict[int, int] = {}

    def probability(self, count: float) -> float:
        """Chance that a prefix given up with this decayed count of uses is wanted again (rule of succession)."""
        kind = self._class(count)
        return (self._returns.get(kind, 0) + 1) / (self._chances.get(kind, 0) + 2)

    def given_up(self, key: int, count: float) -> None:
        kind = self._class(count)
        self._given_up[key] = kind
        self._given_up.move_to_end(key)
        self._chances[kind] = self._chances.get(kind, 0) + 1
        if len(self._given_up) > self.max_keys:
            self._given_up.popitem(last=False)

    def wanted(self, key: int) -> None:
        kind = self._given_up.pop(key, None)
        if kind is not None:
            self._returns[kind] = self._returns.get(kind, 0) + 1

    @staticmethod
    def _class(count: float) -> int:
        return max(-8, min(8, math.floor(math.log2(count)))) if count > 0 else -9
