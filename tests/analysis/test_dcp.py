"""Sizes, copies, shards and exchanges of decode context parallelism, and every figure of the two posts on it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_engine.analysis import BF16, FP8, AnalysisError, get_model, kv_bytes_per_token
from mini_engine.analysis.dcp import (
    context_parallel_sizes,
    contiguous_run,
    exchange_bytes,
    exchange_collectives,
    judge_size,
    kv_bytes_per_token_per_rank,
    kv_copies,
    model_exchange_bytes,
    replicated_query_bytes,
    up_projection_ratio,
)
from mini_engine.analysis.dcp_shapes import attention_names, get_attention
from mini_engine.analysis.shards import kv_bytes_per_token_per_card
from mini_engine.analysis.tables import read_table
from mini_engine.errors import ConfigError

QWEN3_235B, KIMI_K2, DEEPSEEK_V3 = (get_attention(name) for name in ("qwen3-235b-a22b", "kimi-k2", "deepseek-v3"))
SMOLLM2, SMOLLM2_PADDED = get_attention("smollm2-135m"), get_attention("smollm2-135m-padded")
POST = read_table("dcp_post")["table"]


def speedup() -> float:
    """DCP at the highest load over TP where it has come to its plateau."""
    return POST["dcp_tokens_per_s_per_gpu"][-1] / POST["tp_tokens_per_s_per_gpu"][-1]


FIGURES: dict[str, Callable[[], float]] = {
    "dcp_speedup": speedup,
    "dcp_max_qwen235b_tp8": lambda: max(context_parallel_sizes(QWEN3_235B, 8)),
    "dcp_max_mla_tp8": lambda: max(context_parallel_sizes(KIMI_K2, 8)),
    "tp_kv_copies_gqa": lambda: kv_copies(QWEN3_235B.kv_heads, 8),
    "tp_kv_copies_mla": lambda: kv_copies(KIMI_K2.kv_heads, 8),
    "decompose_200k_4": lambda: contiguous_run(200_000, 4),
}
TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("figures_dcp.toml").read_text(encoding="utf-8"))[
    "figure"
]


@pytest.mark.parametrize("figure", TABLE, ids=[figure["id"] for figure in TABLE])
def test_the_posts_figure_is_computed(figure: dict[str, Any]) -> None:
    assert FIGURES[figure["id"]]() == pytest.approx(figure["value"], rel=figure["rel_tol"], abs=0)


def test_every_computation_belongs_to_one_figure() -> None:
    assert sorted(FIGURES) == sorted(figure["id"] for figure in TABLE)


@pytest.mark.parametrize(
    "name, tp, sizes",
    [
        ("qwen3-8b", 8, (1,)),
        ("qwen3-8b", 16, (1, 2)),
        ("qwen3-8b", 32, (1, 2, 4)),
        ("qwen3-235b-a22b", 8, (1, 2)),
        ("qwen3-235b-a22b", 4, (1,)),
        ("llama-3.1-70b", 8, (1,)),
        ("llama-3.1-70b", 64, (1, 2, 4, 8)),
        ("deepseek-v2-lite", 2, (1, 2)),  # the post's example command
        ("deepseek-v3", 8, (1, 2, 4, 8)),
        ("kimi-k2", 16, (1, 2, 4, 8, 16)),
        ("smollm2-135m", 9, (1, 3)),
        ("smollm2-135m", 6, ()),
        ("smollm2-135m-padded", 6, (1, 2)),
        ("smollm2-135m-padded", 12, (1, 2, 4)),
    ],
)
def test_sizes_over_real_models(name, tp, sizes):
    assert context_parallel_sizes(get_attention(name), tp) == sizes


def test_the_size_vllm_takes_and_that_mixes_heads():
    verdict = judge_size(heads=12, kv_heads=2, tp=6, size=2)
    assert (verdict.ours, verdict.posts, verdict.vllm_0_33) == (False, False, True)
    assert verdict.mixed_groups == ((2, 3),)


@pytest.mark.parametrize("tp", [2, 4, 6, 8, 12, 16, 24, 48])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
def test_what_we_allow_never_mixes_heads_and_the_posts_rule_allows_it_too(tp, kv_heads):
    for size in (n for n in range(2, tp + 1) if tp % n == 0):
        verdict = judge_size(48, kv_heads, tp, size)
        assert not verdict.ours or (verdict.posts and verdict.vllm_0_33 and not verdict.mixed_groups)


def test_a_size_the_posts_rule_takes_and_that_mixes_heads():
    """8 // 3 = 2 copies, the posts count; but the third rank of 8 holds parts of two KV heads."""
    verdict = judge_size(heads=24, kv_heads=3, tp=8, size=2)
    assert verdict.posts and not verdict.ours and verdict.mixed_groups


# Bytes of a token on a rank: layers * values * 2 bytes, by hand.
@pytest.mark.parametrize(
    "name, tp, size, expected",
    [
        ("qwen3-235b-a22b", 1, 1, 94 * 2 * 4 * 128 * 2),
        ("qwen3-235b-a22b", 4, 1, 94 * 2 * 128 * 2),
        ("qwen3-235b-a22b", 8, 1, 94 * 2 * 128 * 2),  # twice the ranks, not a byte less
        ("qwen3-235b-a22b", 8, 2, 94 * 2 * 128),
        ("kimi-k2", 1, 1, 61 * 576 * 2),
        ("kimi-k2", 8, 1, 61 * 576 * 2),
        ("kimi-k2", 8, 8, 61 * 576 * 2 / 8),
        ("smollm2-135m-padded", 12, 4, 30 * 2 * 64 * 2 / 4),
    ],
)
def test_kv_of_a_rank(name, tp, size, expected):
    assert kv_bytes_per_token_per_rank(get_attention(name), tp, size) == expected
    assert kv_bytes_per_token_per_rank(get_attention(name), tp, size, FP8) == expected / 2


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-70b", "smollm2-135m"])
def test_dense_models_agree_with_the_tables_of_the_engine(name):
    model, shape = get_model(name), get_attention(name)
    assert kv_bytes_per_token_per_rank(shape, 1) == kv_bytes_per_token(model, BF16)
    assert shape.attention_values == model.hidden_size * (2 * model.q_size + 2 * model.kv_size)
    if name != "smollm2-135m":
        for tp in (2, 8, 16):
            assert kv_bytes_per_token_per_rank(shape, tp) == kv_bytes_per_token_per_card(model, tp, BF16)


def test_mla_weights_of_a_layer():
    """Kimi K2: query down and up, latent and rotary key, up to keys and values, output."""
    by_hand = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    assert KIMI_K2.attention_values == by_hand
    lite = get_attention("deepseek-v2-lite")
    assert lite.attention_values == 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048


def test_kv_of_a_million_tokens():
    """70 GB of latents: more than a third of a B200 on every rank, unless the ranks share."""
    assert kv_bytes_per_token_per_rank(KIMI_K2, 8) * 10**6 == pytest.approx(70.3e9, rel=1e-3)
    assert kv_bytes_per_token_per_rank(KIMI_K2, 8, 8) * 10**6 == pytest.approx(8.78e9, rel=1e-3)


@pytest.mark.parametrize(
    "comm, q_replicate, collectives, expected",
    [
        # 8 ranks, 1 token, 64 heads of 576 in and 512 out, 2 bytes: 7/8 * 64 = 56 rows come from others.
        ("ag_rs", False, 3, 56 * 576 * 2 + 7 * 64 * 4 + 56 * 512 * 2),
        ("ag_rs", True, 2, 7 * 64 * 4 + 56 * 512 * 2),
        ("a2a", False, 2, 56 * 576 * 2 + 56 * (512 * 2 + 4)),
        ("a2a", True, 1, 56 * (512 * 2 + 4)),
    ],
)
def test_bytes_of_an_exchange_by_hand(comm, q_replicate, collectives, expected):
    assert exchange_bytes(comm, q_replicate, 8, 1, 64, 576, 512) == expected
    assert exchange_bytes(comm, q_replicate, 8, 5, 64, 576, 512) == 5 * expected
    assert exchange_collectives(comm, q_replicate) == collectives
    assert model_exchange_bytes(KIMI_K2, 8, 8, 1, comm, q_replicate) == 61 * expected


def test_one_rank_exchanges_nothing():
    assert exchange_bytes("ag_rs", False, 1, 9, 64, 576, 512) == 0


def test_a_context_group_has_the_heads_of_its_ranks_only():
    """Qwen3-235B at tp 8, dcp 2: 2 of 8 ranks hold 16 of 64 heads; one rank's 8 come from the other."""
    assert model_exchange_bytes(QWEN3_235B, 8, 2, 1, "a2a") == 94 * (8 * 128 * 2 + 8 * (128 * 2 + 4))


def test_price_of_a_replicated_query_projection():
    """Kimi K2: up-projection of queries and the absorbed half of the latent's, 7/8 of them more on each of 8 ranks."""
    values = 61 * (1536 * 64 * 192 + 512 * 64 * 128)
    assert replicated_query_bytes(KIMI_K2, 8, 8) == values * 2 * 7 // 8
    assert replicated_query_bytes(KIMI_K2, 8, 1) == 0


def test_projecting_latents_up_costs_about_120_times_the_absorbed_form():
    assert up_projection_ratio(DEEPSEEK_V3) == pytest.approx(120, rel=0.01)


@pytest.mark.parametrize(
    "ask, error, says",
    [
        (lambda: exchange_bytes("ring", False, 2, 1, 8, 4, 4), AnalysisError, "'ring' is not one of ag_rs, a2a"),
        (lambda: exchange_bytes("a2a", False, 3, 1, 8, 4, 4), AnalysisError, "8 query heads .* 3 ranks"),
        (lambda: exchange_bytes("a2a", False, 2, -1, 8, 4, 4), AnalysisError, "batch"),
        (lambda: kv_bytes_per_token_per_rank(QWEN3_235B, 8, 4), ConfigError, "must divide the 2 copies"),
        (lambda: model_exchange_bytes(SMOLLM2, 6, 2, 1), ConfigError, "6 must divide the 9 query heads"),
        (lambda: judge_size(9, 3, 6, 2), AnalysisError, "6 ranks must divide 9"),
        (lambda: up_projection_ratio(QWEN3_235B), AnalysisError, "no latent"),
        (lambda: get_attention("gpt-2"), AnalysisError, "is not in the table"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, error, says):
    with pytest.raises(error, match=says):
        ask()


def test_every_model_of_the_table_can_be_read():
    assert {get_attention(name).name for name in attention_names()} == set(attention_names())
