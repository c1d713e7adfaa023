"""Break-even by link, Helix layouts, and where wide expert parallelism overtakes DCP: shapes and hand-made sums."""

from __future__ import annotations

import itertools

import pytest

from mini_engine.analysis import FP8, AnalysisError, get_hardware, get_link
from mini_engine.analysis.dcp import exchange_bytes
from mini_engine.analysis.dcp_layouts import (
    FABRICS,
    NVFP4,
    Fabric,
    HelixLayout,
    break_even_context,
    dcp_step,
    dep_overtakes,
    dep_step,
    exchange_seconds,
    expert_read_bytes,
    fullest_rank,
    helix_layouts,
)
from mini_engine.analysis.dcp_shapes import get_attention

KIMI_K2, QWEN3_235B = get_attention("kimi-k2"), get_attention("qwen3-235b-a22b")
B200 = get_hardware("b200")
SLOW = Fabric("slow", get_link("pcie5-x16"), 10e-6, 8)  # 64 GB/s


def test_a_collective_is_hops_and_bytes():
    assert SLOW.seconds(64e9, 8) == pytest.approx(3 * 10e-6 + 1)
    assert SLOW.seconds(0, 1) == 0 and SLOW.seconds(0, 5) == pytest.approx(3 * 10e-6)


def test_an_exchange_is_its_collectives():
    """ag_rs: three times three hops. a2a with replicated queries: once."""
    moved = exchange_bytes("ag_rs", False, 8, 4, 64, 576, 512)
    assert exchange_seconds(KIMI_K2, SLOW, 8, 8, 4, "ag_rs") == pytest.approx(90e-6 + moved / 64e9)
    moved = exchange_bytes("a2a", True, 8, 4, 64, 576, 512)
    assert exchange_seconds(KIMI_K2, SLOW, 8, 8, 4, "a2a", True) == pytest.approx(30e-6 + moved / 64e9)
    assert exchange_seconds(KIMI_K2, SLOW, 8, 1, 4) == 0


@pytest.mark.parametrize("shape, size", [(KIMI_K2, 8), (QWEN3_235B, 2)])
@pytest.mark.parametrize("fabric", FABRICS.values(), ids=FABRICS)
def test_break_even_is_where_the_reads_spared_pay_for_the_exchange(shape, size, fabric):
    for batch in (1, 16):
        context = break_even_context(shape, B200, fabric, 8, size, batch)
        per_token = shape.cached_values / shape.kv_heads * 2 * (1 - 1 / size) / B200.bandwidth
        exchange = exchange_seconds(shape, fabric, 8, size, batch)
        assert batch * (context - 1) * per_token < exchange <= batch * context * per_token


def test_break_even_falls_with_batch_and_with_a_better_link_but_not_to_nothing():
    contexts = [break_even_context(KIMI_K2, B200, FABRICS["nvlink"], 8, 8, batch) for batch in (1, 4, 16, 64, 256)]
    assert contexts == sorted(contexts, reverse=True)
    slow = [break_even_context(KIMI_K2, B200, FABRICS["pcie5"], 8, 8, batch) for batch in (1, 4, 16, 64, 256)]
    assert all(a > 2 * b for a, b in zip(slow, contexts, strict=True))
    # What is left at a large batch is bytes against bytes: of one token's exchange, over those of a cached token.
    limit = exchange_bytes("a2a", False, 8, 1, 64, 576, 512) / (576 * 2 * 7 / 8) * 8000 / 900
    assert break_even_context(KIMI_K2, B200, FABRICS["nvlink"], 8, 8, 10**6) == pytest.approx(limit, rel=0.001)


def test_fewer_collectives_break_even_earlier():
    found = [
        break_even_context(KIMI_K2, B200, FABRICS["nvlink"], 8, 8, 1, comm, replicate)
        for comm, replicate in (("ag_rs", False), ("ag_rs", True), ("a2a", False), ("a2a", True))
    ]
    assert found[0] > found[1] > found[3] and found[0] > found[2] > found[3]


def test_helix_layouts():
    assert helix_layouts(KIMI_K2, 8) == [HelixLayout(1, 8, t, 8 // t) for t in (1, 2, 4, 8)]
    for layout in helix_layouts(get_attention("deepseek-v3"), 64):
        assert layout.tp_attention * layout.kvp == layout.tp_ffn * layout.ep == 64
    # Heads first, then the context; the FFN of a model whose experts are not in the table is cut by its width.
    assert helix_layouts(QWEN3_235B, 8) == [HelixLayout(t, 8 // t, 8, 1) for t in (1, 2, 4)]


@pytest.mark.parametrize("contexts, ranks, fullest", [((5, 4, 3, 3, 3), 2, 10), ((9, 1, 1, 1), 2, 9), ((7,), 4, 7)])
def test_whole_requests_on_ranks(contexts, ranks, fullest):
    assert fullest_rank(contexts, ranks) == fullest


def test_experts_read_by_a_batch():
    """Against counting, for every draw of 2 of 4 experts by each of 2 tokens: 3 of 4 experts on average."""
    draws = list(itertools.combinations(range(4), 2))
    mean = sum(len({*a, *b}) for a in draws for b in draws) / len(draws) ** 2
    assert mean == 4 * (1 - (1 - 2 / 4) ** 2)
    one = NVFP4.bytes_for(3 * 7168 * 2048)
    moe = KIMI_K2.moe
    assert moe is not None
    assert expert_read_bytes(KIMI_K2, moe, 1) == pytest.approx(60 * (8 + 1) * one)
    assert expert_read_bytes(KIMI_K2, moe, 10_000) == pytest.approx(60 * (384 + 1) * one)


def test_parts_of_a_step_by_hand():
    """4 requests of 100,000 tokens on 4 ranks: the same KV on each, whichever way."""
    dcp, dep = (step(KIMI_K2, B200, FABRICS["nvlink"], 4, [100_000] * 4) for step in (dcp_step, dep_step))
    assert dcp.kv_s == dep.kv_s == pytest.approx(100_000 * 61 * FP8.bytes_for(576) / 8e12)
    assert dep.attention_weights_s == 4 * dcp.attention_weights_s == 61 * KIMI_K2.attention_values * 2 / 8e12
    assert dcp.expert_weights_s == dep.expert_weights_s
    assert dep.tokens_per_second_per_rank == pytest.approx(1 / dep.seconds)
    assert dcp.seconds == dcp.kv_s + dcp.attention_weights_s + dcp.expert_weights_s + dcp.exchange_s


def test_one_long_request_waits_for_its_rank_alone_under_dep():
    """The capacity argument turned into time: a million tokens among short ones."""
    contexts = [1_000_000, *[10_000] * 7]
    dcp, dep = (step(KIMI_K2, B200, FABRICS["nvlink"], 8, contexts) for step in (dcp_step, dep_step))
    assert dep.kv_s / dcp.kv_s == pytest.approx(8 * 1_000_000 / sum(contexts))


def test_the_exchange_of_dcp_grows_with_the_domain_and_that_of_experts_hardly():
    def exchange(step, ranks):
        return step(KIMI_K2, B200, FABRICS["nvl72"], ranks, [50_000] * (8 * ranks)).exchange_s

    assert exchange(dcp_step, 64) > 4 * exchange(dcp_step, 8)
    assert exchange(dep_step, 64) < 2.1 * exchange(dep_step, 8)


def uneven(ranks: int, per_rank: int) -> list[int]:
    """One request in 32 has a million tokens, the others 50,000."""
    return [1_000_000 if i % 32 == 0 else 50_000 for i in range(ranks * per_rank)]


def test_wide_expert_parallelism_overtakes_as_the_domain_grows():
    domains = (8, 16, 32, 64)

    def crossing(per_rank):
        return dep_overtakes(KIMI_K2, B200, FABRICS["nvl72"], domains, lambda ranks: uneven(ranks, per_rank))

    assert crossing(1) is None  # too few requests to fill the ranks: cutting each keeps all of them busy
    first = {per_rank: crossing(per_rank) for per_rank in (4, 8, 16)}
    assert all(found is not None and found > 8 for found in (first[4], first[8]))
    assert first[4] >= first[8] >= first[16]


@pytest.mark.parametrize(
    "ask, says",
    [
        (lambda: FABRICS["nvlink"].seconds(1, 16), "nvlink joins 8 ranks, not 16"),
        (lambda: break_even_context(KIMI_K2, B200, SLOW, 8, 1, 1), "size must be above 1"),
        (lambda: helix_layouts(KIMI_K2, 7), "64 query heads .* 7 ranks"),
        (lambda: dep_step(QWEN3_235B, B200, FABRICS["nvlink"], 8, [1]), "no experts of qwen3-235b-a22b"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, says):
    with pytest.raises(AnalysisError, match=says):
        ask()
