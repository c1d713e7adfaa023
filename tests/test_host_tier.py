"""The host tier: what is admitted, what is fetched, and what happens when the host is full, slow or broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.block import Block
from mini_engine.decisions import Decision, write_json_lines
from mini_engine.errors import ConfigError
from mini_engine.host_tier import BlockName, Fault, Fetch, HostTier
from mini_engine.transfer import Lane, TransferLink

BLOCK_BYTES, SIZE = 1000, 16
LINK = TransferLink(bytes_per_s=1e6)  # a block takes 1 ms
RECOMPUTE_S = 1e-3  # of a token, so 16 ms of a block


def tier(slots: int = 4, link: TransferLink = LINK, **settings: Any) -> HostTier:
    recompute = settings.pop("recompute_s", lambda new, history: new * RECOMPUTE_S)
    return HostTier(slots * BLOCK_BYTES, BLOCK_BYTES, SIZE, link, recompute, **settings)


def block(key: int, depth: int = 0) -> Block:
    """A block that a pool is about to give out; hashes of a prefix count up from its first."""
    return Block(7, block_hash=key, parent_hash=key - 1, tokens=(key,), depth=depth)


def names(*keys: int) -> list[BlockName]:
    return [(key, key - 1, (key,)) for key in keys]


def fill(host: HostTier, keys: Sequence[int], now: float = 0.0) -> None:
    """Offer the blocks of one prefix, last first as a pool gives them out, and wait until they have landed."""
    for depth in reversed(range(len(keys))):
        assert host.offer(block(keys[depth], depth), now)
    host.settle(now + 1.0)


def serve(host: HostTier, keys: Sequence[int], now: float) -> tuple[int, float]:
    """What a caller does: (blocks it got, seconds after which it knew)."""
    host.use(keys)
    found = host.find(names(*keys))
    if not host.choose(found, now):
        return 0, 0.0
    fetch = host.fetch(found, now)
    return (0 if fetch.ready_s is None else len(found)), fetch.stop_waiting_s - now


def test_what_was_offered_is_found_once_it_has_landed() -> None:
    host = tier()
    host.offer(block(2, 1), 0.0)
    host.offer(block(1), 0.0)
    assert host.find(names(1, 2)) == ()
    host.settle(1.5e-3)
    assert [found.block_hash for found in host.find(names(2))] == [2]  # the second copy waited for the first
    assert host.find(names(1, 2)) == ()
    host.settle(2e-3)
    assert [found.block_hash for found in host.find(names(1, 2, 3))] == [1, 2]


def test_a_collision_is_no_hit() -> None:
    host = tier()
    fill(host, [1])
    assert host.find([(1, 0, (99,))]) == host.find([(1, 5, (1,))]) == ()


def test_a_fetch_takes_its_bytes_over_the_link_and_waits_its_turn() -> None:
    host = tier(link=TransferLink(1e6, latency_s=0.5e-3))
    fill(host, [1, 2])
    first = host.fetch(host.find(names(1)), now=5.0)
    second = host.fetch(host.find(names(2)), now=5.0)
    assert first.ready_s == pytest.approx(5.0015) and second.ready_s == pytest.approx(5.003)


def test_a_fetch_no_faster_than_recompute_is_refused_and_counted() -> None:
    slow = tier(link=TransferLink(BLOCK_BYTES / (SIZE * RECOMPUTE_S)))  # to the microsecond as fast
    fill(slow, [1])
    assert serve(slow, [1], now=5.0) == (0, 0.0)
    assert slow.counts["fetch", "recompute", "no faster than recompute"] == 1
    assert not any(kind[:2] == ("fetch", "fetch") for kind in slow.counts)


def test_the_queue_is_part_of_the_price() -> None:
    """30 blocks on their way take 30 ms: one more block, 16 ms of computing, is computed."""
    host = tier(slots=40)
    fill(host, list(range(1, 32)))
    assert host.choose(host.find(names(31)), 5.0)
    host.fetch(host.find(names(*range(1, 31))), 5.0)
    assert not host.choose(host.find(names(31)), 5.0)
    assert host.choose(host.find(names(31)), 5.03)


@pytest.mark.parametrize(
    "fault, got, waited, reason",
    [
        (Fault(), 2, 2e-3, None),
        (Fault(slowdown=1.9), 2, 3.8e-3, None),
        (Fault(fails=True), 0, 2e-3, "failed"),
        (Fault(slowdown=50), 0, 4e-3, "too slow"),
        (Fault(slowdown=50, fails=True), 0, 4e-3, "too slow"),
    ],
)
def test_a_broken_fetch_falls_back_and_loses_nothing(fault: Fault, got: int, waited: float, reason: str | None) -> None:
    host = tier(faults=lambda: fault)
    fill(host, [1, 2])
    assert serve(host, [1, 2], now=5.0) == (got, pytest.approx(waited))
    lost = {kind: count for kind, count in host.counts.items() if kind[:2] == ("fetch", "recompute")}
    assert lost == ({("fetch", "recompute", reason): 1} if reason else {})
    host.settle(9.0)
    assert [found.block_hash for found in host.find(names(1, 2))] == [1, 2]  # the copies are still there
    assert host.pool.num_free == host.num_slots  # and nothing is held any more


def test_nobody_waits_longer_than_computing_takes() -> None:
    """Quoted 10 ms against 16: patience would allow 20."""
    host = tier(link=TransferLink(1e5), faults=lambda: Fault(slowdown=50))
    fill(host, [1])
    assert serve(host, [1], now=5.0) == (0, pytest.approx(16e-3))


def test_a_slot_that_a_transfer_reads_is_not_given_out() -> None:
    host = tier(slots=1, faults=lambda: Fault(slowdown=100))
    fill(host, [1])
    fetch = host.fetch(host.find(names(1)), now=5.0)
    assert fetch.ready_s is None and fetch.stop_waiting_s < fetch.done_s
    assert not host.offer(block(9), now=fetch.stop_waiting_s)  # given up, but the link still reads it
    assert host.counts["admit", "drop", "host full"] == 1
    assert host.offer(block(9), now=fetch.done_s)
    assert host.find(names(1)) == ()


def test_a_full_host_drops_what_its_policy_says() -> None:
    host = tier(slots=2)
    fill(host, [1])
    fill(host, [11])
    host.fetch(host.find(names(1)), now=5.0)
    host.settle(6.0)
    fill(host, [21], now=7.0)  # the least recently used goes
    assert [bool(host.find(names(key))) for key in (1, 11, 21)] == [True, False, True]
    assert host.counts["evict", "drop", "budget"] == 1


def test_more_writes_at_once_than_slots() -> None:
    host = tier(slots=2)
    assert [host.offer(block(key), 0.0) for key in (1, 11, 21)] == [True, True, False]
    assert host.counts["admit", "drop", "host full"] == 1
    assert host.used_bytes == 2 * BLOCK_BYTES


def test_what_is_there_is_not_written_again() -> None:
    host = tier()
    assert host.offer(block(1), 0.0) and host.offer(block(1), 0.0)  # still being written
    host.settle(1.0)
    assert host.offer(block(1), 1.0)
    assert host.to_host.busy_s == pytest.approx(1e-3)
    assert host.counts["admit", "keep", "already there"] == 2


def test_second_sight_wants_to_see_a_prefix_twice() -> None:
    host = tier(admission="second_sight")
    host.use([1])
    assert not host.offer(block(1), 0.0)
    assert host.counts["admit", "drop", "first sight"] == 1
    host.use([1])  # computed again: it came back
    assert host.offer(block(1), 1.0)
    host.use([5])
    host.use([5])  # used twice before it was ever evicted
    assert host.offer(block(5), 2.0)
    host.use([7, 7])
    for other in range(100, 112):  # three half-lives later
        host.use([other])
    assert host.popularity.count(7) < 1 and host.offer(block(7), 3.0)


def test_value_admits_what_is_likely_to_come_back() -> None:
    """A block is worth 16 ms, and 1 ms either way over the link: from p = 1/15 on."""
    host = tier(slots=100, admission="value")
    assert host.offer(block(0), 0.0)  # nothing learned yet: every second time
    for key in range(1, 40):  # used once, never wanted again
        host.use([key])
        host.offer(block(key), 0.0)
    host.use([999])
    assert not host.offer(block(999), 0.0)
    assert host.counts["admit", "drop", "worth less than its upkeep"] > 0


def test_what_comes_back_is_admitted_again() -> None:
    host = tier(slots=100, admission="value", link=TransferLink(BLOCK_BYTES / 6e-3))  # worth it from p = 0.6 on
    assert not host.offer(block(999), 0.0)
    for key in range(1, 40):
        host.use([key])
        host.offer(block(key), 0.0)
        host.use([key])  # each is wanted once more, before anything else
    host.use([999])
    assert host.offer(block(999), 0.0)


def test_a_later_block_costs_more_to_compute() -> None:
    """Computing costs 1 ms a token and 1 ms for every 16 before it; a block moves in 24 ms."""
    decisions: list[Decision] = []
    host = tier(
        link=TransferLink(BLOCK_BYTES / 24e-3), recompute_s=lambda new, h: new * 1e-3 + h / 16e3, log=decisions.append
    )
    fill(host, range(1, 21)[:4])
    assert not host.choose(host.find(names(1)), 5.0)
    host.offer(block(30, depth=10), 5.0)
    host.settle(9.0)
    assert host.choose(host.find(names(30)), 9.0)
    assert [each.recompute_s for each in decisions if each.key == 30] == pytest.approx([26e-3, 26e-3])


def test_every_decision_is_written_down_with_its_numbers(tmp_path) -> None:
    decisions: list[Decision] = []
    host = tier(slots=1, log=decisions.append)
    fill(host, [1])
    host.choose(host.find(names(1)), 2.0)
    fill(host, [5], now=3.0)
    write_json_lines(decisions, tmp_path / "log.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["what"], row["key"], row["choice"]) for row in rows] == [
        ("admit", 1, "write"),
        ("fetch", 1, "fetch"),
        ("admit", 5, "write"),
        ("evict", 1, "drop"),
    ]
    for row in rows:
        value = row["probability"] * (row["recompute_s"] - row["fetch_s"]) - row["upkeep_s"]
        assert row["value_s"] == pytest.approx(value)
        assert (row["num_bytes"], row["recompute_s"]) == (BLOCK_BYTES, pytest.approx(16e-3))
    assert [row["upkeep_s"] for row in rows] == pytest.approx([1e-3, 0, 1e-3, 0])
    assert sum(host.counts.values()) == len(rows)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["offer", "serve"]), st.integers(0, 3), st.integers(1, 4), st.floats(0, 4e-3)),
    max_size=40,
)


@given(
    events=EVENTS,
    slots=st.integers(1, 6),
    admission=st.sampled_from(["always", "second_sight", "value"]),
    faults=st.lists(st.builds(Fault, st.floats(1, 30), st.booleans()), min_size=1, max_size=4),
    cheap=st.booleans(),
)
def test_budget_prices_and_references_hold(events, slots: int, admission, faults: list[Fault], cheap: bool) -> None:
    calls = iter(faults * 50)
    host = tier(
        slots, admission=admission, faults=lambda: next(calls), recompute_s=lambda n, h: n * (3e-5 if cheap else 1e-3)
    )
    now, fetches = 0.0, list[Fetch]()
    for what, prefix, length, wait in events:
        now += wait
        keys = [100 * prefix + i for i in range(1, length + 1)]
        if what == "offer":
            host.offer(block(keys[-1], length - 1), now)
        else:
            host.use(keys)
            found = host.find(names(*keys))
            recompute, quote = host.recompute_s(len(found) * SIZE, 0), host.from_host.quote(now, len(found) * 1000)
            if host.choose(found, now):
                assert quote < recompute
                fetches.append(host.fetch(found, now))
                assert fetches[-1].stop_waiting_s - now <= recompute + 1e-12
        assert 0 <= host.used_bytes <= slots * BLOCK_BYTES
        held = {held.block_id for fetch in fetches if fetch.done_s > now for held in fetch.blocks}
        free = {free.block_id for free in host.pool.free_blocks()}
        assert not held & free
        for fetch in fetches:  # what is on its way is still what was asked for
            if fetch.done_s > now:
                assert all(held.block_hash in host.pool.cached for held in fetch.blocks)
    host.settle(now + 10)
    assert host.pool.num_free == slots and len(list(host.pool.free_blocks())) == slots
    assert len(host.pool.cached) == host.used_bytes // BLOCK_BYTES


def test_one_lane_carries_one_transfer_at_a_time() -> None:
    lane = Lane(TransferLink(1e3, latency_s=0.1))
    assert lane.start(10.0, 1000) == pytest.approx(11.1)
    assert lane.quote(10.5, 500) == pytest.approx(0.6 + 0.6)
    assert lane.start(10.5, 500) == pytest.approx(11.7)
    assert lane.start(20.0, 1000, slowdown=2) == pytest.approx(22.2)
    assert lane.busy_s == pytest.approx(1.1 + 0.6 + 2.2)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: HostTier(999, 1000, 16, LINK, lambda n, h: 1.0), "999 bytes holds no block of 1,000"),
        (lambda: tier(admission="third_sight"), "admission must be one of always, second_sight, value"),
        (lambda: tier(patience=0.5), "patience must be at least 1, got 0.5"),
        (lambda: TransferLink(0), "more than 0 bytes a second"),
        (lambda: TransferLink(1, -1), "at least 0 s"),
    ],
)
def test_what_cannot_work_is_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
