"""Which prefixes survive: a trace against the real block pool, under any eviction policy, with or without a host tier.

    one request after another, in order of arrival:
        match the pool → match the host → fetch or recompute → allocate (evictions are offered to the host) → free

Only prefills take time: decoding, batching and overlap are left out, so that what differs between two runs is what was
found. Outputs take blocks but leave nothing to find: a trace does not say what they were. The whole scheduler on the
virtual clock: `loop.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mini_engine.analysis import (
    BOOK_PREFILL_MFU,
    GiB,
    Hardware,
    block_bytes,
    causal_pairs,
    flops_per_pair,
    linear_flops_per_token,
    recompute_seconds,
)
from mini_engine.block import Block
from mini_engine.block_manager import BlockManager
from mini_engine.cache_key import CacheKey, hash_block
from mini_engine.config import ModelConfig
from mini_engine.errors import PoolTooSmall, RequestError
from mini_engine.eviction import make_policy
from mini_engine.host_tier import BlockName, HostTier
from mini_engine.simulator.belady import belady_hits
from mini_engine.simulator.replay import ReplaySequence
from mini_engine.simulator.workloads import Request


@dataclass(frozen=True)
class PrefixPrices:
    """What a block takes and what computing it costs. block_size: tokens. mfu: share of the card's peak in prefills."""

    model: ModelConfig
    hardware: Hardware
    block_size: int
    mfu: float = BOOK_PREFILL_MFU

    def __post_init__(self) -> None:
        recompute_seconds(self.model, self.hardware, 0, mfu=self.mfu)  # its refusals

    @cached_property
    def block_bytes(self) -> int:
        return block_bytes(self.model, self.block_size)

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        rate = self.mfu * self.hardware.peak(self.model.dtype)
        return linear_flops_per_token(self.model) / rate, flops_per_pair(self.model) / rate

    def recompute_s(self, new: int, history: int = 0) -> float:
        """As `analysis.recompute_seconds`, T_r, without working out the model's shape anew each time."""
        token, pair = self._seconds
        return new * token + causal_pairs(new, history) * pair

    def block_saving(self, depth: int) -> float:
        """Seconds that finding one block saves, by the number of blocks before it."""
        return self.recompute_s(self.block_size, depth * self.block_size)


@dataclass(frozen=True)
class KeyedTrace:
    """Requests with the hash chain of their full prompt blocks, worked out once for all runs. block_size: tokens."""

    requests: tuple[Request, ...]
    keys: tuple[tuple[int, ...], ...]
    block_size: int

    def wanted(self) -> list[tuple[int, ...]]:
        """Blocks a request can find: not the one of its last token, which is computed in any case."""
        size = self.block_size
        return [
            keys[: (request.num_prompt_tokens - 1) // size]
            for request, keys in zip(self.requests, self.keys, strict=True)
        ]


def keyed_trace(requests: Iterable[Request], block_size: int | None = None) -> KeyedTrace:
    """block_size: None takes the trace's own. Raises RequestError where requests disagree on it."""
    requests = tuple(requests)
    sizes = {request.block_size for request in requests if request.block_ids}
    if block_size is None:
        if len(sizes) != 1:
            raise RequestError(f"the requests' ids stand for {sorted(sizes)} tokens: name one block_size")
        (block_size,) = sizes
    root, keys = CacheKey(), []
    for number, request in enumerate(requests):
        seq = ReplaySequence(request, number)
        chain: list[int] = []
        parent: int | CacheKey = root
        for start in range(0, request.num_prompt_tokens // block_size * block_size, block_size):
            parent = hash_block(parent, seq.block_content(start, start + block_size))
            chain.append(parent)
        keys.append(tuple(chain))
    return KeyedTrace(requests, tuple(keys), block_size)


@dataclass
class ReuseReport:
    """What one run found. Tokens of prompts; seconds of prefill on one accelerator.

    saved_s: against computing every prompt whole: T_r of what was found, less the seconds waited for fetches (those of
    lost ones too). upkeep_s: of copies to the host, which run beside the prefills and are not in saved_s.
    """

    policy: str
    num_blocks: int
    prompt_tokens: int = 0
    pool_hit_tokens: int = 0
    host_hit_tokens: int = 0
    full_recompute_s: float = 0.0
    saved_s: float = 0.0
    wait_s: float = 0.0
    lost_wait_s: float = 0.0
    upkeep_s: float = 0.0
    num_evictions: int = 0
    decisions: dict[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens found, in the pool or on the host."""
        return (self.pool_hit_tokens + self.host_hit_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved_share(self) -> float:
        """Share of the seconds of computing everything."""
        return self.saved_s / self.full_recompute_s if self.full_recompute_s else 0.0


class PrefixReplay:
    """One run. policy, half_life: see `make_policy`. tier: None for a pool alone; one tier serves one run."""

    def __init__(
        self,
        trace: KeyedTrace,
        prices: PrefixPrices,
        num_blocks: int,
        policy: str = "lru",
        tier: HostTier | None = None,
        half_life: float | None = None,
    ):
        if prices.block_size != trace.block_size:
            raise RequestError(f"prices are for blocks of {prices.block_size} tokens, the trace has {trace.block_size}")
        self.trace, self.prices, self.tier = trace, prices, tier
        self.now = 0.0
        order = make_policy(policy, num_blocks, prices.block_saving, half_life)
        self.blocks = BlockManager(num_blocks + 1, trace.block_size, eviction_policy=order)
        self.blocks.pool.on_evict = self._evicted
        self.report = ReuseReport(policy, num_blocks)
        for request in trace.requests:
            needed = self.blocks.blocks_for(request.num_prompt_tokens + request.num_output_tokens - 1)
            if needed > num_blocks:
                size = needed * prices.block_bytes / GiB
                raise PoolTooSmall(
                    f"{request.request_id} needs {needed} blocks, the pool has {num_blocks}: give it {size:.1f} GiB"
                )

    def run(self) -> ReuseReport:
        for number, (request, keys) in enumerate(zip(self.trace.requests, self.trace.keys, strict=True)):
            self.serve(number, request, keys)
        report = self.report
        if self.tier is not None:
            report.upkeep_s = self.tier.to_host.busy_s
            report.decisions = {" / ".join(kind): count for kind, count in sorted(self.tier.counts.items())}
        return report

    def serve(self, number: int, request: Request, keys: Sequence[int]) -> int:
        """Serve one request; returns its tokens found."""
        blocks, size, prices, report = self.blocks, self.trace.block_size, self.prices, self.report
        seq = ReplaySequence(request, number)
        seq.block_hashes = list(keys)
        self.now = max(self.now, request.arrival)
        hits = blocks.match_prefix(seq)
        fetched = self._fetch(seq, len(hits))
        found = (len(hits) + fetched) * size
        blocks.admit(seq, hits)
        blocks.grow(seq, request.num_prompt_tokens + request.num_output_tokens - 1)
        seq.num_computed_tokens = request.num_prompt_tokens
        blocks.cache_full_blocks(seq, len(hits), len(keys))
        blocks.free(seq)
        whole = prices.recompute_s(seq.num_prompt_tokens)
        rest = prices.recompute_s(seq.num_prompt_tokens - found, found)
        self.now += rest
        report.prompt_tokens += seq.num_prompt_tokens
        report.pool_hit_tokens += len(hits) * size
        report.host_hit_tokens += fetched * size
        report.full_recompute_s += whole
        report.saved_s += whole - rest
        return found

    def _fetch(self, seq: ReplaySequence, first: int) -> int:
        """Blocks from the `first` on that the host delivers; the clock moves on while the request waits for them."""
        tier = self.tier
        if tier is None:
            return 0
        tier.settle(self.now)
        tier.use(seq.block_hashes)
        found = tier.find(self._names(seq, first))
        if not tier.choose(found, self.now):
            return 0
        fetch = tier.fetch(found, self.now)
        waited = fetch.stop_waiting_s - self.now
        self.now = fetch.stop_waiting_s
        self.report.wait_s += waited
        self.report.saved_s -= waited
        if fetch.ready_s is None:
            self.report.lost_wait_s += waited
            return 0
        return len(found)

    def _names(self, seq: ReplaySequence, first: int) -> Iterator[BlockName]:
        size, keys = self.trace.block_size, seq.block_hashes
        for i in range(first, (seq.num_tokens - 1) // size):
            yield keys[i], keys[i - 1] if i else self.blocks.root(seq), seq.block_content(i * size, i * size + size)

    def _evicted(self, block: Block) -> None:
        self.report.num_evictions += 1
        if self.tier is not None:
            self.tier.offer(block, self.now)


def belady_report(trace: KeyedTrace, prices: PrefixPrices, num_blocks: int) -> ReuseReport:
    """The bound on hits. No seconds: which prefixes those blocks belong to, and so what they save, is not asked."""
    hits = sum(belady_hits(trace.wanted(), num_blocks))
    tokens = sum(request.num_prompt_tokens for request in trace.requests)
    return ReuseReport("belady (bound)", num_blocks, tokens, hits * trace.block_size)
