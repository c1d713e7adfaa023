"""The value of a kept prefix, and which of several to keep: against trying every set."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    QWEN3_8B,
    RTX_PRO_6000,
    AnalysisError,
    KeptPrefix,
    Link,
    MiB,
    append_turn,
    best_kept,
    common_tokens,
    get_link,
    greedy_gap_s,
    greedy_kept,
    kept_prefix,
    knapsack,
    recompute_seconds,
    reusable_tokens,
    rewrite_turn,
    summary_turn,
)

GEN5, GEN4 = get_link("pcie5-x16"), get_link("pcie4-x16")


def a_or_b(name: str, tokens: int, link: Link = GEN5, probability: float = 0.5) -> KeptPrefix:
    return kept_prefix(name, QWEN3_8B, RTX_PRO_6000, link, tokens, probability)


@pytest.mark.parametrize("link", [GEN5, GEN4], ids=["gen5", "gen4"])
@pytest.mark.parametrize("shift, best", [(0.001, ("A",)), (-0.001, ("B1", "B2", "B3"))])
def test_exercise_8_4_tips_at_the_tie(link: Link, shift: float, best: tuple[str, ...]) -> None:
    bs = [a_or_b(f"B{i}", 2048, link) for i in (1, 2, 3)]
    tie = a_or_b("A", 6144, link).probability_worth(sum(b.value_s for b in bs))
    assert tie is not None
    kept = best_kept([a_or_b("A", 6144, link, tie + shift), *bs], 864 * MiB)
    assert kept.names == best
    assert kept.num_bytes == 864 * MiB


def test_the_efficiency_the_book_prints_is_not_the_one_it_uses() -> None:
    """Pitfall 9: 62 % would make 308.9 ms."""
    assert recompute_seconds(QWEN3_8B, RTX_PRO_6000, 6144) * 1e3 == pytest.approx(307.9, abs=0.05)
    assert recompute_seconds(QWEN3_8B, RTX_PRO_6000, 6144, mfu=0.62) * 1e3 == pytest.approx(308.9, abs=0.05)


def test_recompute_in_two_parts_is_recompute_in_one() -> None:
    parts = recompute_seconds(QWEN3_8B, RTX_PRO_6000, 100) + recompute_seconds(QWEN3_8B, RTX_PRO_6000, 60, history=100)
    assert parts == pytest.approx(recompute_seconds(QWEN3_8B, RTX_PRO_6000, 160), rel=1e-12)


@given(p=st.floats(0, 1), recompute=st.floats(0, 1), fetch=st.floats(0, 1), upkeep=st.floats(0, 0.1))
def test_value_is_the_mean_over_hits_and_misses(p: float, recompute: float, fetch: float, upkeep: float) -> None:
    """What is paid without keeping, less what is paid with it: upkeep in both cases, on a hit the fetch."""
    prefix = KeptPrefix("x", 1, p, recompute, fetch, upkeep)
    without = p * recompute
    with_it = p * (fetch + upkeep) + (1 - p) * upkeep
    assert prefix.value_s == pytest.approx(without - with_it, abs=1e-12)
    if prefix.threshold is not None:
        at_threshold = KeptPrefix("x", 1, prefix.threshold, recompute, fetch, upkeep)
        assert at_threshold.value_s == pytest.approx(0, abs=1e-9)


def test_no_probability_is_worth_a_fetch_slower_than_recomputing() -> None:
    slow = kept_prefix("slow", QWEN3_8B, RTX_PRO_6000, Link("modem", 1e9), 2048, 1.0)
    assert slow.hit_saving_s < 0 and slow.value_s < 0 and slow.threshold is None
    assert best_kept([slow], 10**12).names == greedy_kept([slow], 10**12).names == ()


prefixes = st.lists(
    st.builds(
        KeptPrefix,
        name=st.just("x"),
        num_bytes=st.integers(1, 12),
        reuse_probability=st.sampled_from([0.0, 0.3, 1.0]),
        recompute_s=st.floats(0, 10),
        fetch_s=st.floats(0, 2),
        upkeep_s=st.floats(0, 1),
    ),
    max_size=8,
)


@given(choice=prefixes, budget=st.integers(0, 40))
def test_the_best_set_is_that_of_trying_all(choice: list[KeptPrefix], budget: int) -> None:
    values = [
        sum(prefix.value_s for prefix in some)
        for count in range(len(choice) + 1)
        for some in combinations(choice, count)
        if sum(prefix.num_bytes for prefix in some) <= budget
    ]
    best, greedy = best_kept(choice, budget), greedy_kept(choice, budget)
    assert best.value_s == pytest.approx(max(values), abs=1e-9)
    assert best.num_bytes <= budget and greedy.num_bytes <= budget
    assert best.value_s >= greedy.value_s - 1e-9


def test_where_value_per_mib_misleads() -> None:
    """A dense small prefix leaves a hole that the large one does not fit: the price of pitfall 8."""
    small = KeptPrefix("small", 30 * MiB, 1.0, 0.033, 0.0, 0.0)
    large = KeptPrefix("large", 100 * MiB, 1.0, 0.100, 0.0, 0.0)
    assert small.value_s_per_mib > large.value_s_per_mib
    assert greedy_kept([large, small], 100 * MiB).names == ("small",)
    assert best_kept([large, small], 100 * MiB).names == ("large",)
    assert greedy_gap_s([large, small], 100 * MiB) == pytest.approx(0.067)


def test_too_many_open_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "MAX_SETS", 100)
    many = [KeptPrefix(str(i), 2**i, 1.0, 2.0**i, 0.0, 0.0) for i in range(8)]
    with pytest.raises(AnalysisError, match="more than 100 choices among 8 prefixes"):
        best_kept(many, 10**6)


TOOLS, SYSTEM = ("tools", 3000), ("system", 500)


@pytest.mark.parametrize(
    "first, second, common",
    [
        ([("10:00", 12), SYSTEM, TOOLS], [("10:01", 12), SYSTEM, TOOLS], 0),
        ([TOOLS, SYSTEM, ("10:00", 12)], [TOOLS, SYSTEM, ("10:01", 12)], 3500),
        ([TOOLS, ("10:00", 12), SYSTEM], [TOOLS, ("10:01", 12), SYSTEM], 3000),
        ([TOOLS], [TOOLS, SYSTEM], 3000),
        ([], [TOOLS], 0),
    ],
)
def test_a_time_stamp_belongs_last(first: list, second: list, common: int) -> None:
    assert common_tokens(first, second) == common


@pytest.mark.parametrize(
    "prompt, common, reused", [(300, 100, 96), (300, 16, 16), (300, 15, 0), (64, 64, 48), (65, 65, 64)]
)
def test_whole_blocks_are_found(prompt: int, common: int, reused: int) -> None:
    """Pitfall 6: 100 common tokens are 96. The last token of a prompt is computed whatever is cached."""
    assert reusable_tokens(prompt, common) == reused


def test_three_ways_to_go_on() -> None:
    """Figure 8-20: 8K and a tool result of 1K; rewritten from the start; or a summary of 2K and the 1K."""
    append, rewrite, summary = append_turn(8192, 1024), rewrite_turn(8192, 1024), summary_turn(8192, 2048, 1024)
    assert [(turn.reused, turn.computed, turn.context) for turn in (append, rewrite, summary)] == [
        (8192, 1024, 9216),
        (0, 9216, 9216),
        (0, 3072, 3072),
    ]
    # The summarising call finds all but the last block, and generates; the summary is then read at another place.
    assert (summary.extra_computed, summary.extra_generated, summary.prefilled) == (16, 2048, 3088)
    reads = [turn.later_read_bytes(QWEN3_8B, 256) for turn in (append, summary)]
    assert reads[0] == 3 * reads[1] == 256 * 9216 * 147_456


def test_what_stays_in_front_is_found_again() -> None:
    assert rewrite_turn(8192, 1024, unchanged=1000).reused == 992
    summary = summary_turn(8192, 2048, 1024, unchanged=1000, instruction=40)
    assert (summary.reused, summary.context, summary.extra_computed) == (992, 4072, 40)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: recompute_seconds(QWEN3_8B, RTX_PRO_6000, 10, mfu=62), "share of the peak in .0, 1., got 62"),
        (lambda: KeptPrefix("x", 1, 1.5, 0, 0, 0), "x: reuse_probability must lie in .0, 1., got 1.5"),
        (lambda: KeptPrefix("x", 0, 0.5, 0, 0, 0), "num_bytes"),
        (lambda: rewrite_turn(10, 5, unchanged=11), "11 unchanged tokens are more than the 10"),
        (lambda: summary_turn(10, 2, 5, unchanged=11), "11 unchanged tokens are more than the 10"),
    ],
)
def test_what_cannot_be_is_refused(call, says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        call()
