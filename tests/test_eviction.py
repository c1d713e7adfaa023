"""Eviction policies against their definitions, worked out from the history of events alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mini_engine.block import Block
from mini_engine.block_manager import BlockManager
from mini_engine.config import EngineConfig, SchedulerConfig
from mini_engine.errors import ConfigError
from mini_engine.eviction import FIFO, LFU, LRU, POLICIES, EvictionPolicy, Value, make_policy
from mini_engine.popularity import Popularity, ReturnEstimate
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence
from tests.analysis.book_figures_8_3 import replay_hits
from tests.scheduling import ShadowMemory, make_scheduler, run, sequence

NUM_BLOCKS, SIZE = 13, 2


class Witness:
    """Hands everything on to a policy and keeps what a policy may know: one event after another."""

    learns = True

    def __init__(self, policy: EvictionPolicy):
        self.policy = policy
        self.events: list[tuple[str, int]] = []  # (what, hash)

    def remembered(self, block: Block) -> None:
        self._note("remembered", block)
        self.policy.remembered(block)

    def hit(self, block: Block) -> None:
        self._note("hit", block)
        self.policy.hit(block)

    def forgotten(self, block: Block) -> None:
        self._note("forgotten", block)
        self.policy.forgotten(block)

    def add(self, block: Block) -> None:
        self._note("add", block)
        self.policy.add(block)

    def remove(self, block: Block) -> None:
        self.policy.remove(block)

    def pop(self) -> Block | None:
        return self.policy.pop()

    def __contains__(self, block: Block) -> bool:
        return block in self.policy

    def __iter__(self) -> Iterator[Block]:
        return iter(self.policy)

    def _note(self, what: str, block: Block) -> None:
        assert block.block_hash is not None
        self.events.append((what, block.block_hash))

    def since_known(self, key: int) -> list[tuple[int, str]]:
        """(place, what) of all that happened to a block since it became known."""
        own = [(i, what) for i, (what, other) in enumerate(self.events) if other == key]
        return own[max(i for i, (_, what) in enumerate(own) if what == "remembered") :]

    def last(self, key: int, what: str) -> int:
        return max(i for i, kind in self.since_known(key) if kind == what)

    def first(self, key: int, what: str) -> int:
        return min(i for i, kind in self.since_known(key) if kind == what)

    def hits(self, key: int) -> int:
        return sum(kind == "hit" for _, kind in self.since_known(key))


def rank_value(witness: Witness, block: Block, known: dict[int, Block]) -> tuple[bool, float]:
    uses = [key for what, key in witness.events if what in ("remembered", "hit")]
    total = sum(2 ** ((i + 1) / NUM_BLOCKS) for i, key in enumerate(uses) if key == block.block_hash)
    has_child = any(other.parent_hash == block.block_hash for other in known.values())
    return has_child, math.log2(total) + math.log2(1 + block.depth)


Rank = Callable[[Witness, Block, dict[int, Block]], tuple[float, ...]]
RANKS: dict[str, Rank] = {
    "lru": lambda witness, block, _: (witness.last(block.block_hash or 0, "add"),),
    "fifo": lambda witness, block, _: (witness.first(block.block_hash or 0, "add"),),
    "lfu": lambda witness, block, _: (
        witness.hits(block.block_hash or 0),
        witness.last(block.block_hash or 0, "add"),
    ),
    "value": rank_value,
}


class Evictions(RuleBasedStateMachine):
    """Requests that share prefixes come, fork and go in a pool that is always short of blocks."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.witness = Witness(make_policy(self.name, NUM_BLOCKS, lambda depth: 1.0 + depth))
        self.manager = BlockManager(NUM_BLOCKS + 1, SIZE, eviction_policy=self.witness)
        self.manager.pool.on_evict = self.evicted
        self.alive: list[Sequence] = []
        self.count = 0

    def evicted(self, block: Block) -> None:
        assert block.ref_count == 0 and block.num_copies == 0
        assert all(block.block_id not in seq.block_table for seq in self.alive), "a block in use was given out"
        free = list(self.manager.pool.free_blocks())
        assert all(other.block_hash is not None for other in free), "a block without a hash goes first"

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def come(self, prompt: list[int]) -> None:
        self.count += 1
        seq = Sequence(str(self.count), prompt)
        hits = self.manager.match_prefix(seq)
        needed = self.manager.blocks_for(seq.num_tokens) - self.manager.num_shared(hits)
        if needed > self.manager.num_free_blocks:
            return
        self.manager.admit(seq, hits)
        self.alive.append(seq)
        seq.num_computed_tokens = seq.num_tokens
        self.manager.cache_full_blocks(seq, len(hits), seq.num_tokens // SIZE)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        seq = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.manager.free(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        child = parent.fork(1)
        self.manager.fork(parent, child)
        self.alive.append(child)

    @precondition(lambda self: not self.alive)
    @rule()
    def forget_everything(self) -> None:
        before = [block.block_id for block in self.manager.pool.free_blocks()]
        assert self.manager.reset_prefix_cache()
        assert [block.block_id for block in self.manager.pool.free_blocks()] == before
        assert not self.manager.pool.cached

    @invariant()
    def blocks_are_whole(self) -> None:
        self.manager.check(self.alive)

    @invariant()
    def the_order_is_the_definition(self) -> None:
        known = self.manager.pool.cached
        ranks = [RANKS[self.name](self.witness, block, known) for block in self.witness]
        for earlier, later in zip(ranks, ranks[1:], strict=False):
            assert earlier[0] < later[0] or (earlier[0] == later[0] and earlier[-1] <= later[-1] + 1e-9), ranks


@pytest.mark.parametrize("policy", POLICIES)
def test_order_of_giving_out(policy: str) -> None:
    class Machine(Evictions):
        name = policy

    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_reads_what_was_given_out(name: str) -> None:
    """The real scheduler in a tight pool, with a memory that knows what was written where."""
    scheduler = make_scheduler(num_blocks=40, block_size=4, max_num_seqs=4, eviction_policy=name)
    memory, draw = ShadowMemory(40, 4), random.Random(1)
    for i in range(60):
        start = list(range(draw.choice([8, 20, 33])))
        scheduler.add(sequence(str(i), [*start, *(1000 + i for _ in range(draw.randint(1, 30)))], draw.randint(1, 9)))
    run(scheduler, memory=memory)
    assert scheduler.stats.prefix_hit_tokens > 0


def cached_chain(policy: EvictionPolicy, num_blocks: int, *prompts: list[int]) -> BlockManager:
    """The prompts, computed and freed one after another."""
    manager = BlockManager(num_blocks + 1, 1, eviction_policy=policy)
    for i, prompt in enumerate(prompts):
        ask(manager, prompt, str(i))
    return manager


def ask(manager: BlockManager, prompt: list[int], name: str = "x") -> int:
    """Serve one prompt whole; returns the blocks found."""
    seq = Sequence(name, prompt)
    hits = manager.match_prefix(seq)
    manager.admit(seq, hits)
    seq.num_computed_tokens = seq.num_tokens
    manager.cache_full_blocks(seq, len(hits), seq.num_tokens)
    manager.free(seq)
    return len(hits)


HOT, SCAN = [1, 2, 3, 4], [[100 * i + j for j in range(5)] for i in range(1, 6)]


@pytest.mark.parametrize("name, found", [("lru", 0), ("fifo", 0), ("lfu", 3), ("value", 3)])
def test_a_scan_flushes_what_only_recency_kept(name: str, found: int) -> None:
    """A prefix used often, then five long prompts that nobody repeats."""
    manager = cached_chain(make_policy(name, 12, half_life=100), 12, HOT, HOT, HOT, *SCAN)
    assert ask(manager, HOT) == found


def test_fifo_forgets_the_first_in_however_often_it_was_used() -> None:
    other = [7, 8, 9]
    for policy, found in ((FIFO(), 0), (LRU(), 3)):
        manager = cached_chain(policy, 8, HOT, other, HOT)  # 4 and 3 blocks, then HOT again
        ask(manager, [20, 21, 22, 23, 24])
        assert ask(manager, HOT) == found


def test_lfu_keeps_what_was_popular_once_and_value_lets_it_fade() -> None:
    old, new = [1, 2, 3], [11, 12, 13]  # the last token of a prompt is never found: look at the second
    for policy, first_lost in ((LFU(), 12), (make_policy("value", 8, half_life=4), 2)):
        manager = cached_chain(policy, 8, *[old] * 9, *[new] * 3)
        order = [block.tokens[0] for block in manager.pool.policy]
        assert min(2, 12, key=order.index) == first_lost


def test_value_gives_out_the_end_of_a_prefix_first_though_it_saves_most() -> None:
    manager = cached_chain(Value(100, lambda depth: 1.0 + 10 * depth), 8, [1, 2, 3, 4])
    order = [block.tokens[0] for block in manager.pool.policy]
    assert order[0] == 4
    manager.pool.forget(manager.pool.blocks[next(b.block_id for b in manager.pool.policy if b.tokens == (4,))])
    assert next(iter(manager.pool.policy)).tokens == (3,)


def test_value_ranks_by_seconds_saved_where_popularity_is_equal() -> None:
    """Two ends of prefixes, used alike: the deeper one costs more to compute again and stays longer."""
    manager = cached_chain(Value(1e9, lambda depth: 1.0 + depth), 8, [1, 2, 3], [9])
    assert next(iter(manager.pool.policy)).tokens == (9,)
    manager = cached_chain(Value(1e9, lambda depth: 9.0 - depth), 8, [9], [1, 2, 3])
    assert next(iter(manager.pool.policy)).tokens == (3,)


@pytest.mark.parametrize("pool_gib, hits", [(6, 16_304), (1, 0)])
def test_lru_counts_events_and_not_seconds(pool_gib: int, hits: int) -> None:
    """Book 8.3.4: 0.2 s more between the rounds change nothing; nor would an hour."""
    assert sum(replay_hits(pool_gib)) == hits
    for gap in (0.2, 3600.0):
        assert replay_hits(pool_gib, gap_s=gap) == replay_hits(pool_gib)


@pytest.mark.parametrize("name, kind", [("lru", LRU), ("fifo", FIFO), ("lfu", LFU), ("value", Value)])
def test_the_setting_reaches_the_pool(name, kind) -> None:
    config = EngineConfig(eviction_policy=name).scheduler_config(100, 9)
    assert type(Scheduler(config).blocks.pool.policy) is kind
    assert type(Scheduler(SchedulerConfig()).blocks.pool.policy) is LRU


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction_policy must be one of lru, fifo, lfu, value, got 'mru'"):
        make_policy("mru", 9)


@given(uses=st.lists(st.integers(0, 4), max_size=60), half_life=st.floats(0.5, 50))
def test_popularity_is_the_decayed_sum(uses: list[int], half_life: float) -> None:
    popularity = Popularity(half_life, max_keys=10)
    for key in uses:
        popularity.use(key)
    for key in range(5):
        ages = [len(uses) - 1 - i for i, used in enumerate(uses) if used == key]
        assert popularity.count(key) == pytest.approx(sum(2 ** (-age / half_life) for age in ages), rel=1e-9)


def test_popularity_remembers_the_most_popular() -> None:
    popularity = Popularity(1000, max_keys=3)
    for key in [1, 1, 1, 2, 2, *range(10, 15)]:
        popularity.use(key)
    assert len(popularity) == 3 and popularity.count(1) > 2.9 and popularity.count(10) == 0
    assert popularity.used_again(1) and not popularity.used_again(10)
    for key in [20] * 9 + [21] * 9 + [22] * 9 + list(range(30, 34)):
        popularity.use(key)
    assert not popularity.used_again(1)  # forgotten with its count


@pytest.mark.parametrize("half_life, max_keys", [(0, 1), (-1, 1), (1, 0)])
def test_popularity_refuses_what_cannot_work(half_life: float, max_keys: int) -> None:
    with pytest.raises(ConfigError, match="half_life must be above 0"):
        Popularity(half_life, max_keys)


def test_the_chance_of_return_is_learned_by_class_of_use() -> None:
    returns = ReturnEstimate(max_keys=100)
    assert returns.probability(1.0) == 0.5
    for key in range(20):
        returns.given_up(key, 1.0)  # used once: one in ten comes back
        returns.given_up(100 + key, 4.0)  # used four times: all do
    for key in (0, 1, *range(100, 120)):
        returns.wanted(key)
        returns.wanted(key)  # once is enough
    assert returns.probability(1.5) == pytest.approx(3 / 22)
    assert returns.probability(4.0) == pytest.approx(21 / 22)
    assert returns.probability(0.1) == 0.5


def test_what_was_given_up_long_ago_does_not_return() -> None:
    returns = ReturnEstimate(max_keys=2)
    for key in range(3):
        returns.given_up(key, 1.0)
    returns.wanted(0)
    assert returns.probability(1.0) == pytest.approx(1 / 5)
