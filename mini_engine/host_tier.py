"""A second home for evicted prefix blocks: host memory behind a link. No tensors here, and no real clock.

    offer()    the pool is about to give out a cached block: keep a copy on the host?     (admission, swap)
    choose()   a request wants blocks that only the host has: fetch or recompute?         (recompute)
    fetch()    start the transfer; it lands later, and may be slow or fail
    settle()   what has landed by now

The host's slots are a `BlockPool` of their own, with an eviction policy of their own: a slot that a transfer reads or
writes has a reference, so it is not given out. Each decision is priced by V_h = p_h (T_r − T_f) − T_m (book 8.3.4),
counted by its reason and, where asked for, written down.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mini_engine.block import Block
from mini_engine.block_pool import BlockPool
from mini_engine.cache_key import CacheKey
from mini_engine.decisions import Decision
from mini_engine.errors import ConfigError
from mini_engine.eviction import EvictionPolicy
from mini_engine.popularity import Popularity, ReturnEstimate
from mini_engine.transfer import Lane, TransferLink

BlockName = tuple[int, int | CacheKey, tuple[int, ...]]
"""What a block is: its hash, and what that was made from, so that a collision is no hit."""
Admission = Literal["always", "second_sight", "value"]
ADMISSIONS: tuple[Admission, ...] = ("always", "second_sight", "value")


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one transfer. slowdown: times the link's own seconds. fails: known only when it ends."""

    slowdown: float = 1.0
    fails: bool = False


NO_FAULT = Fault()


@dataclass(frozen=True)
class Fetch:
    """A transfer to the accelerator. ready_s: when the blocks may be used, None where they never may.

    done_s: when the link has let go of both ends, whatever came of it: no end may be reused before.
    stop_waiting_s: when the caller knows: blocks are there, or it has to recompute.
    """

    blocks: tuple[Block, ...]
    ready_s: float | None
    done_s: float
    stop_waiting_s: float


class HostTier:
    """A store of at most `budget_bytes`.

    block_bytes, block_size: bytes and tokens of one block.
    recompute_s: seconds to compute (new tokens, after that many known ones), T_r.
    admission: "always"; "second_sight", which refuses what was never used twice; "value", which refuses V_h <= 0.
    policy: which copy goes when the budget is full; None is LRU.
    patience: a fetch is given up for lost after that many times its quoted seconds, and never later than T_r.
    faults: asked before each fetch, for tests. log: given every decision.
    """

    def __init__(
        self,
        budget_bytes: int,
        block_bytes: int,
        block_size: int,
        link: TransferLink,
        recompute_s: Callable[[int, int], float],
        admission: Admission = "always",
        policy: EvictionPolicy | None = None,
        patience: float = 2.0,
        faults: Callable[[], Fault] = lambda: NO_FAULT,
        log: Callable[[Decision], None] | None = None,
    ):
        if block_bytes < 1 or budget_bytes < block_bytes:
            raise ConfigError(
                f"a host tier of {budget_bytes:,} bytes holds no block of {block_bytes:,}: raise the budget to that"
            )
        if admission not in ADMISSIONS:
            raise ConfigError(f"admission must be one of {', '.join(ADMISSIONS)}, got {admission!r}")
        if not patience >= 1:
            raise ConfigError(f"patience must be at least 1, got {patience}: no fetch would ever be waited for")
        self.block_bytes, self.block_size = block_bytes, block_size
        self.link, self.recompute_s, self.admission = link, recompute_s, admission
        self.patience, self.faults, self.log = patience, faults, log
        self.num_slots = budget_bytes // block_bytes
        self.pool = BlockPool(self.num_slots + 1, policy)
        self.pool.on_evict = self._note_eviction
        self.to_host, self.from_host = Lane(link), Lane(link)
        self.popularity = Popularity(self.num_slots, 4 * self.num_slots)
        self.returns = ReturnEstimate(4 * self.num_slots)
        self._transfer_s = block_bytes / link.bytes_per_s  # a prefix moves as a whole and pays its latency once
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """Decisions by (what, choice, reason)."""
        self.on_write: Callable[[Block, Block], None] | None = None
        """Told of each copy that starts, as (block, slot): for an owner that moves real bytes."""
        self._writing: deque[tuple[float, Block, Block]] = deque()  # (lands at, slot, what it will hold), in order
        self._writing_keys: set[int] = set()
        self._reading: deque[Fetch] = deque()  # in order: a lane carries one transfer at a time
        self._now = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes that hold something or are being written."""
        return (len(self.pool.cached) + len(self._writing)) * self.block_bytes

    def use(self, keys: Sequence[int]) -> None:
        """A request wants these blocks, wherever they are: what p_h is learned from."""
        for key in keys:
            self.returns.wanted(key)
            self.popularity.use(key)

    def settle(self, now: float) -> None:
        """Take note of all transfers that have landed by `now`. Time never goes back."""
        self._now = max(self._now, now)
        while self._writing and self._writing[0][0] <= self._now:
            _, slot, content = self._writing.popleft()
            assert content.block_hash is not None and content.parent_hash is not None
            self._writing_keys.remove(content.block_hash)
            self.pool.remember(slot, content.block_hash, content.parent_hash, content.tokens, content.depth)
            self.pool.release([slot])
        while self._reading and self._reading[0].done_s <= self._now:
            self.pool.release(reversed(self._reading.popleft().blocks))

    def offer(self, block: Block, now: float) -> bool:
        """A cached block is about to be given out. Starts the copy and returns True, if it is to be kept.

        The block's memory must not be written before the copy has read it; that is the caller's affair.
        """
        self.settle(now)
        assert block.block_hash is not None, "only a block of a known prefix is worth keeping"
        key, count = block.block_hash, self.popularity.count(block.block_hash)
        probability = self.returns.probability(count)
        self.returns.given_up(key, count)
        choice, reason = self._admission(block, key, probability)
        self._decide("admit", [block], self._transfer_s, self._transfer_s, probability, choice, reason)
        if choice != "write":
            return choice == "keep"
        slot = self.pool.take()
        content = replace(block, block_id=slot.block_id, ref_count=0, prev_free=None, next_free=None)
        self._writing.append((self.to_host.start(self._now, self.block_bytes), slot, content))
        self._writing_keys.add(key)
        if self.on_write is not None:
            self.on_write(block, slot)
        return True

    def find(self, names: Iterable[BlockName]) -> tuple[Block, ...]:
        """The host's copies of these blocks, up to the first that it has not (or not yet)."""
        found = []
        for name in names:
            block = self.pool.find(*name)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def choose(self, found: Sequence[Block], now: float) -> bool:
        """Whether to fetch these blocks, which follow each other: only if that beats computing them, queue included.

        All or none: what the k-th block saves grows with k, since later tokens attend to more; its bytes do not.
        """
        self.settle(now)
        if not found:
            return False
        recompute = self._recompute_s(found)
        fetch = self.from_host.quote(self._now, len(found) * self.block_bytes)
        better = fetch < recompute
        reason = "saves time" if better else "no faster than recompute"
        choice = "fetch" if better else "recompute"
        self._decide("fetch", found, fetch, 0.0, 1.0, choice, reason)
        return better

    def fetch(self, found: Sequence[Block], now: float) -> Fetch:
        """Start moving the blocks. A transfer that fails or is too slow leaves the caller where it was, less the time
        waited: the host's copy stays, and the tokens can be computed."""
        self.settle(now)
        for block in found:
            self.pool.reuse(block)
        num_bytes, fault = len(found) * self.block_bytes, self.faults()
        quoted = self.from_host.quote(self._now, num_bytes)
        done = self.from_host.start(self._now, num_bytes, fault.slowdown)
        give_up = self._now + min(self.patience * quoted, self._recompute_s(found))
        arrived = not fault.fails and done <= give_up
        fetch = Fetch(tuple(found), done if arrived else None, done, min(done, give_up))
        self._reading.append(fetch)
        if not arrived:
            reason = "failed" if fault.fails and done <= give_up else "too slow"
            self._decide("fetch", found, fetch.stop_waiting_s - self._now, 0.0, 1.0, "recompute", reason)
        return fetch

    def clear(self) -> None:
        """Forget every copy, those under way too. What was learned of the prefixes stays."""
        self.pool.release([slot for _, slot, _ in self._writing])
        self._writing.clear()
        self._writing_keys.clear()
        self.pool.forget_all()

    def check(self) -> None:
        """Every slot is free, being written or being read, and no key has two slots. Raises AssertionError."""
        owners = Counter(slot.block_id for _, slot, _ in self._writing)
        owners.update(slot.block_id for fetch in self._reading for slot in fetch.blocks)
        free = sorted(slot.block_id for slot in self.pool.free_blocks())
        assert free == [i for i in range(1, self.num_slots + 1) if not owners[i]], f"free {free}, owned {owners}"
        assert len(free) == self.pool.num_free, f"{len(free)} slots in the free queue, {self.pool.num_free} counted"
        for slot in self.pool.blocks[1:]:
            assert slot.ref_count == owners[slot.block_id], f"slot {slot.block_id}: {slot.ref_count} references"
        assert len(self._writing) == len(self._writing_keys) and not self._writing_keys & self.pool.cached.keys()

    def _admission(self, block: Block, key: int, probability: float) -> tuple[str, str]:
        if key in self.pool.cached or key in self._writing_keys:
            return "keep", "already there"
        if self.admission == "second_sight" and not self.popularity.used_again(key):
            return "drop", "first sight"
        if self.admission == "value":
            saving = self._recompute_s([block]) - self._transfer_s
            if probability * saving <= self._transfer_s:
                return "drop", "worth less than its upkeep"
        if not self.pool.num_free:
            return "drop", "host full"
        return "write", "admitted"

    def _recompute_s(self, found: Sequence[Block]) -> float:
        return self.recompute_s(len(found) * self.block_size, found[0].depth * self.block_size)

    def _note_eviction(self, block: Block) -> None:
        assert block.block_hash is not None
        probability = self.returns.probability(self.popularity.count(block.block_hash))
        self._decide("evict", [block], self._transfer_s, 0.0, probability, "drop", "budget")

    def _decide(
        self,
        what: str,
        blocks: Sequence[Block],
        fetch_s: float,
        upkeep_s: float,
        probability: float,
        choice: str,
        reason: str,
    ) -> None:
        self.counts[what, choice, reason] += 1
        if self.log is not None:
            recompute_s, key = self._recompute_s(blocks), blocks[0].block_hash
            assert key is not None
            value_s = probability * (recompute_s - fetch_s) - upkeep_s
            size = len(blocks) * self.block_bytes
            times = (recompute_s, fetch_s, upkeep_s, probability, value_s)
            self.log(Decision(self._now, what, key, size, *times, choice, reason))
