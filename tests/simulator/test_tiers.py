"""Traces against the real pool: an oracle of sets for hits, every way to keep blocks for the bound."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.analysis import QWEN3_8B, RTX_PRO_6000, GiB, recompute_seconds
from mini_engine.errors import PoolTooSmall, RequestError
from mini_engine.eviction import POLICIES
from mini_engine.host_tier import Fault, HostTier
from mini_engine.simulator import policies
from mini_engine.simulator.agents import agent_requests
from mini_engine.simulator.belady import belady_hits
from mini_engine.simulator.tiers import KeyedTrace, PrefixPrices, PrefixReplay, belady_report, keyed_trace
from mini_engine.simulator.traces import load_mooncake
from mini_engine.simulator.workloads import Request
from mini_engine.transfer import TransferLink

DATA = Path(__file__).resolve().parent.parent / "data" / "traces"
SIZE = 4
PRICES = PrefixPrices(QWEN3_8B, RTX_PRO_6000, SIZE)
FAST = TransferLink(1e12)


def requests(*prompts: tuple[int, ...], rest: int = 1) -> list[Request]:
    """Prompts of blocks, given by ids, and `rest` tokens more; one a second."""
    return [
        Request(f"r{i}", float(i), len(ids) * SIZE + rest, 1, ids, SIZE if ids else 0) for i, ids in enumerate(prompts)
    ]


def host(slots: int, link: TransferLink = FAST, **settings) -> HostTier:
    size = PRICES.block_bytes
    return HostTier(slots * size, size, SIZE, link, PRICES.recompute_s, **settings)


prompts = st.lists(st.lists(st.integers(0, 2), max_size=4).map(tuple), min_size=1, max_size=25)


@given(prompts)
def test_with_room_for_all_every_known_prefix_is_found(prompts) -> None:
    trace = keyed_trace(requests(*prompts), SIZE)
    known: set[tuple[int, ...]] = set()
    expected = 0
    for ids in prompts:
        prefixes = [ids[: i + 1] for i in range(len(ids))]
        expected += sum(prefix in known for prefix in prefixes)
        known.update(prefixes)
    for policy in POLICIES:
        report = PrefixReplay(trace, PRICES, 130, policy).run()
        assert report.pool_hit_tokens == expected * SIZE and report.num_evictions == 0
    assert belady_report(trace, PRICES, 130).pool_hit_tokens == expected * SIZE


@given(prompts, st.integers(5, 12))
@settings(max_examples=80)
def test_no_policy_beats_the_bound(prompts, num_blocks: int) -> None:
    """Blocks of one size and one cost."""
    trace = keyed_trace(requests(*prompts), SIZE)
    bound = belady_report(trace, PRICES, num_blocks).pool_hit_tokens
    for policy in POLICIES:
        replay = PrefixReplay(trace, PRICES, num_blocks, policy)
        assert replay.run().pool_hit_tokens <= bound
        replay.blocks.check([])
        tiered = PrefixReplay(trace, PRICES, num_blocks, policy, host(3)).run()
        both = belady_report(trace, PRICES, num_blocks + 3).pool_hit_tokens
        assert tiered.pool_hit_tokens + tiered.host_hit_tokens <= both


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6), st.integers(0, 3))
def test_the_bound_is_the_best_of_all_ways_to_keep(wanted: list[list[int]], num_blocks: int) -> None:
    uses = [key for keys in wanted for key in keys]

    @cache
    def best(place: int, kept: frozenset[int]) -> int:
        """Most hits from `place` on: after each use, any blocks of what was there may stay."""
        if place == len(uses):
            return 0
        there = kept | {uses[place]}
        options = [there] if len(there) <= num_blocks else [there - {gone} for gone in there]
        return (uses[place] in kept) + max(best(place + 1, frozenset(option)) for option in options)

    assert sum(belady_hits(wanted, num_blocks)) == best(0, frozenset())


def lru_hits(trace: KeyedTrace, num_blocks: int) -> int:
    """Blocks found by a dictionary in order of use: all that a request needs comes from the oldest."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for request, keys in zip(trace.requests, trace.keys, strict=True):
        matchable = keys[: (request.num_prompt_tokens - 1) // trace.block_size]
        hits = list(takewhile(cache.__contains__, matchable))
        found += len(hits)
        needed = -(-(request.num_prompt_tokens + request.num_output_tokens - 1) // trace.block_size) - len(hits)
        blank = num_blocks - len(cache)
        for key in [key for key in cache if key not in hits][: max(0, needed - blank)]:
            del cache[key]
        for key in reversed([*hits, *(key for key in keys[len(hits) :] if key not in cache)]):
            cache[key] = None
            cache.move_to_end(key)
    return found


@pytest.mark.parametrize("num_blocks", [25, 30, 40, 60, 80])
def test_lru_finds_what_a_dictionary_in_order_of_use_finds(num_blocks: int) -> None:
    trace = keyed_trace(load_mooncake(DATA / "chat.jsonl"))
    report = PrefixReplay(trace, _chat_prices(), num_blocks).run()
    assert report.pool_hit_tokens == lru_hits(trace, num_blocks) * 512


def _chat_prices() -> PrefixPrices:
    return PrefixPrices(QWEN3_8B, RTX_PRO_6000, 512)


def test_time_saved_is_the_recompute_of_what_was_found() -> None:
    trace = keyed_trace(requests((1, 2, 3), (1, 2, 9), (1, 2, 3)), SIZE)
    report = PrefixReplay(trace, PRICES, 50).run()
    whole = 3 * recompute_seconds(QWEN3_8B, RTX_PRO_6000, 13)
    assert report.full_recompute_s == pytest.approx(whole)
    saved = sum(recompute_seconds(QWEN3_8B, RTX_PRO_6000, tokens) for tokens in (8, 12))
    assert report.saved_s == pytest.approx(saved)
    assert (report.prompt_tokens, report.pool_hit_tokens) == (39, 20)


def evicting() -> list[Request]:
    """A prefix, then others that push it out of a pool of four blocks, then it again."""
    return requests((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 3))


def test_the_host_gives_back_what_the_pool_lost() -> None:
    trace = keyed_trace(evicting(), SIZE)
    alone = PrefixReplay(trace, PRICES, 4).run()
    tier = host(10)
    tiered = PrefixReplay(trace, PRICES, 4, tier=tier).run()
    assert (alone.pool_hit_tokens, tiered.pool_hit_tokens, tiered.host_hit_tokens) == (0, 0, 12)
    fetch = FAST.seconds(3 * PRICES.block_bytes)
    assert tiered.wait_s == pytest.approx(fetch)
    assert tiered.saved_s == pytest.approx(recompute_seconds(QWEN3_8B, RTX_PRO_6000, 12) - fetch)
    assert tiered.upkeep_s == pytest.approx(tiered.num_evictions * FAST.seconds(PRICES.block_bytes))
    assert tiered.decisions["fetch / fetch / saves time"] == 1


def test_what_was_fetched_is_in_the_pool_again() -> None:
    trace = keyed_trace([*evicting(), Request("again", 9.0, 13, 1, (1, 2, 3), SIZE)], SIZE)
    report = PrefixReplay(trace, PRICES, 4, tier=host(10)).run()
    assert (report.host_hit_tokens, report.pool_hit_tokens) == (12, 12)


def test_the_last_token_is_computed_even_when_the_host_has_it() -> None:
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 2, 3)]
    report = PrefixReplay(keyed_trace(requests(*prompts, rest=0), SIZE), PRICES, 4, tier=host(10)).run()
    assert report.host_hit_tokens == 8


@pytest.mark.parametrize("fault, reason", [(Fault(fails=True), "failed"), (Fault(slowdown=1e6), "too slow")])
def test_a_lost_fetch_is_computed_and_costs_the_wait(fault: Fault, reason: str) -> None:
    tier = host(10, faults=lambda: fault)
    report = PrefixReplay(keyed_trace(evicting(), SIZE), PRICES, 4, tier=tier).run()
    assert report.host_hit_tokens == 0
    assert report.saved_s == pytest.approx(-report.lost_wait_s) and report.lost_wait_s > 0
    assert report.decisions[f"fetch / recompute / {reason}"] == 1


def test_a_slow_link_is_left_alone() -> None:
    tier = host(10, TransferLink(1e6))
    report = PrefixReplay(keyed_trace(evicting(), SIZE), PRICES, 4, tier=tier).run()
    assert report.wait_s == report.saved_s == 0


@given(prompts, st.floats(1e6, 1e12), st.sampled_from(["always", "second_sight", "value"]), st.integers(1, 6))
@settings(max_examples=60)
def test_never_worse_than_recompute(prompts, rate: float, admission, slots: int) -> None:
    """With a link that keeps its word: no request waits longer than computing would take."""
    trace = keyed_trace(requests(*prompts), SIZE)
    tier = host(slots, TransferLink(rate), admission=admission)
    replay = PrefixReplay(trace, PRICES, 6, tier=tier)
    saved = 0.0
    for number, (request, keys) in enumerate(zip(trace.requests, trace.keys, strict=True)):
        replay.serve(number, request, keys)
        assert replay.report.saved_s >= saved - 1e-12
        saved = replay.report.saved_s
        replay.blocks.check([])
        assert tier.used_bytes <= slots * PRICES.block_bytes


def test_prices_are_those_of_the_analysis() -> None:
    for new, history in ((1, 0), (100, 0), (64, 4096)):
        expected = recompute_seconds(QWEN3_8B, RTX_PRO_6000, new, history)
        assert PRICES.recompute_s(new, history) == pytest.approx(expected)
    assert PRICES.block_saving(3) == pytest.approx(recompute_seconds(QWEN3_8B, RTX_PRO_6000, SIZE, 3 * SIZE))


def test_agent_sessions_are_what_they_say() -> None:
    made = agent_requests(30, seed=3)
    assert made == agent_requests(30, seed=3) != agent_requests(30, seed=4)
    assert [request.arrival for request in made] == sorted(request.arrival for request in made)
    assert all(len(request.block_ids) == request.num_prompt_tokens // 64 for request in made)
    first: dict[str, Request] = {}
    grown = shared = rewritten = 0
    for request in made:
        session = request.request_id.split("/")[0]
        before = first.get(session)
        if before is not None:
            same = request.block_ids[: len(before.block_ids)] == before.block_ids
            grown, rewritten = grown + same, rewritten + (not same)
        first[session] = request
    starts = [request.block_ids[:60] for request in made if request.request_id.endswith("/0")]
    shared = len(starts) - len(set(starts))
    assert grown > 10 * rewritten > 0
    assert len(set(starts)) <= 4 < shared


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: PrefixReplay(keyed_trace(requests((1, 2, 3)), SIZE), PRICES, 3), "r0 needs 4 blocks, the pool has 3"),
        (lambda: PrefixReplay(keyed_trace(requests((1,)), 8), PRICES, 9), "blocks of 4 tokens, the trace has 8"),
        (lambda: keyed_trace(requests(())), "name one block_size"),
        (lambda: agent_requests(0), "at least one session"),
    ],
)
def test_what_cannot_be_is_refused(call, says: str) -> None:
    with pytest.raises((RequestError, PoolTooSmall), match=says):
        call()


def command(*arguments: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    policies.add_arguments(parser)
    return policies.run(parser.parse_args(arguments))


def test_the_command_compares(capsys) -> None:
    assert command(str(DATA / "chat.jsonl"), "--pool-gib", "4,8") == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["belady", *POLICIES] * 2


def test_the_command_as_json_with_a_host_and_a_log(capsys, tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    arguments = ("--pool-gib=4", "--policies=lru", "--host-gib=8", "--admission=second_sight", f"--log={log}", "--json")
    assert command(str(DATA / "chat.jsonl"), *arguments) == 0
    bound, lru = json.loads(capsys.readouterr().out)
    assert lru["pool_hit_tokens"] + lru["host_hit_tokens"] <= bound["pool_hit_tokens"]
    assert lru["num_blocks"] == 4 * GiB // _chat_prices().block_bytes
    assert len(log.read_text().splitlines()) == sum(lru["decisions"].values()) > 0


def test_sessions_from_files_and_made_up(capsys) -> None:
    assert command(str(DATA / "session_a.json"), str(DATA / "session_b.json"), "--session-gap=3", "--pool-gib=2") == 0
    assert command("--sessions=2", "--policies=value", "--pool-gib=4", "--half-life=100", "--limit=5") == 0
    assert "value" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["missing.jsonl"], "missing.jsonl: No such file"),
        (["--pool-gib", "x"], "--pool-gib wants numbers"),
        (["--pool-gib", "0.0001"], "holds no block"),
        (["--pool-gib", "0.1"], "blocks, the pool has"),
        (["--policies", "lru,mru"], "eviction_policy must be one of"),
        (["--log", "x.jsonl"], "--log takes one pool and one policy, got 2 and 4"),
        (["--host-gib", "0.0001"], "holds no block"),
        (["--sessions", "0"], "at least one session"),
        (["--half-life", "0"], "half_life"),
        (["--mfu", "62"], "mfu"),
    ],
)
def test_what_the_command_refuses_is_one_line(arguments: list[str], says: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("--sessions=1", *arguments) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
