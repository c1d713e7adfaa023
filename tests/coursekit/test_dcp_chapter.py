"""What chapter 10 stands on: its small decode step, its pictures, and the stored runs of the simulator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from coursekit.dcp_sweep import _summary, assumptions, read, trace_constants
from coursekit.figures.exchanges import against_context, break_even, exchange_parts, plateau
from coursekit.figures.ranks import SOFT, dealt_out, heads_and_tokens, kv_on_ranks, shares_of_parts
from coursekit.sharded import BLOCK_SIZE, DecodeStep, block_table, decode
from mini_engine.context_shard import ContextShard
from mini_engine.dcp import merge_parts
from mini_engine.simulator.dcp_cost import Cluster
from mini_engine.simulator.dcp_post import published_table
from mini_engine.simulator.dcp_serving import replay
from mini_engine.simulator.dcp_trace import agent_trace

matplotlib = pytest.importorskip("matplotlib")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def other_than(axes, shade: str) -> int:
    """Squares that are not of this shade."""
    face = matplotlib.colors.to_rgba(shade)
    return sum(bar.get_facecolor() != face for bar in axes.patches)


def plain_softmax(step: DecodeStep, length: int) -> torch.Tensor:
    """Attention over the first `length` tokens, written once more: [heads, D]."""
    scores = torch.einsum("thd,lkd->hl", step.q, step.keys[:length]).double() * step.scale
    return torch.softmax(scores, -1) @ step.values[:length, 0].double()


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 17, 200])
def test_the_step_over_ranks_is_the_step(length: int, comm) -> None:
    step = DecodeStep.random(length)
    want = plain_softmax(step, length + 1)
    for size, interleave in ((1, 1), (2, 1), (4, 2), (8, 4)):
        state, groups = decode(step, size, comm, interleave=interleave)
        torch.testing.assert_close(state.out[0].double(), want, atol=1e-5, rtol=1e-5)
        assert (groups[0].num_bytes > 0) == (size > 1 and length > 0)


def test_parts_merge_to_the_context_alone_and_caches_hold_nan_elsewhere() -> None:
    step = DecodeStep.random(21)
    parts = step.parts(4, interleave=2)
    merged = merge_parts(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    torch.testing.assert_close(merged.out[0].double(), plain_softmax(step, 21), atol=1e-5, rtol=1e-5)
    shard = ContextShard(3, 4, 2)
    keys, _ = step.caches(shard, block_table(shard, 21))
    assert (~keys.isnan().any(-1)).sum() == shard.local_length(21) == 4
    assert [part.lse.isneginf().all().item() for part in DecodeStep.random(2).parts(4)] == [False, False, True, True]


def test_a_table_has_no_block_twice_and_not_the_null_block() -> None:
    table = block_table(ContextShard(0, 2), 50)
    assert sorted(table) == list(range(1, -(-50 // (2 * BLOCK_SIZE)) + 1)) and table.dtype == np.int32


@pytest.mark.parametrize("kv_heads, size, copies", [(4, 1, 2), (4, 2, 1), (1, 1, 8), (1, 8, 1), (2, 2, 2)])
def test_each_token_of_each_head_is_drawn_as_often_as_it_is_held(kv_heads: int, size: int, copies: int) -> None:
    held = heads_and_tokens(8, kv_heads, size, 16)
    pairs = [(head, token) for head, tokens in held for token in tokens]
    assert len(pairs) == copies * kv_heads * 16 and len(set(pairs)) == kv_heads * 16
    [axes] = kv_on_ranks({"panel": held}, 16).axes
    assert other_than(axes, SOFT) == len(pairs) and len(axes.patches) == 8 * 16


def test_every_position_is_dealt_once() -> None:
    figure = dealt_out(size=4, interleave=2, block_size=4, length=26)
    said = words(figure)
    assert all(said.count(str(p)) == 1 for p in range(8, 26)), "below 8 a number is a column's too"
    assert "8 tokens" in said and said.count("6 tokens") == 3
    assert len(figure.axes[0].lines) == 3, "two blocks have three edges"


def test_shares_and_exchanges_say_their_numbers() -> None:
    said = words(shares_of_parts({"merge": [0.269, 0.731], "mean": [0.5, 0.5]}, ["rank 0", "rank 1"]))
    assert {"rank 0: 0.269", "rank 1: 0.731", "rank 0: 0.500"} <= set(said)
    said = words(exchange_parts({"ag_rs": {"queries": 63.0, "out": 56.0, "lse": 1.75}}))
    assert {"queries 63", "out 56", "120.8, of it lse 1.75"} <= set(said)


def test_curves_have_their_values_and_names() -> None:
    figure = against_context([1024, 4096], {"reads": [1.0, 4.0], "exchange": [2.0, 2.0]}, "bytes", "title")
    assert [np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].lines] == [[1, 4], [2, 2]]
    assert {"reads", "exchange", "1K", "4K", "bytes"} <= set(words(figure))
    assert {"NVLink", "1", "64"} <= set(words(break_even([1, 64], {"NVLink": [100, 5]}, "title")))


def test_what_was_not_printed_is_not_drawn() -> None:
    kv: dict[str, list[float | None]] = {"TP": [50, 97, 97], "TP, post": [53, 100, None], "DCP": [6, 12, 22]}
    left, right = plateau([16, 32, 64], {"TP": [1, 1.1, 1.2], "DCP, post": [1.3, None, None]}, kv).axes
    assert [np.size(line.get_xdata()) for line in left.lines] == [3, 1]
    assert [(np.size(line.get_xdata()), line.get_linestyle()) for line in right.lines] == [
        (3, "-"),
        (2, "--"),
        (3, "-"),
    ]


def test_the_stored_runs_are_of_todays_assumptions_and_the_posts_rows() -> None:
    rows, stored = read()
    assert stored["assumptions"] == assumptions(Cluster())
    assert stored["trace"] == trace_constants(stored["trace"]["num_requests"])
    table = published_table()
    assert [row.concurrency for row in rows] == table["concurrency"]
    assert [row.dcp_kv.post for row in rows] == [percent / 100 for percent in table["dcp_kv_percent"]]
    assert rows[-1].speedup.post == pytest.approx(6091 / 1863)
    for size, runs in zip((1, 8), stored["runs"].values(), strict=True):
        ours = [row.tp_kv.ours if size == 1 else row.dcp_kv.ours for row in rows]
        assert [run["kv_share"] for run in runs] == pytest.approx(ours, abs=1e-4)
    new = {name: [run["tokens_per_s_per_gpu"]["new"] for run in runs] for name, runs in stored["runs"].items()}
    best = [new["dcp 1"][min(i, 2)] for i in range(6)]  # the post prints TP up to its plateau at 64
    ratios = [dcp / tp for dcp, tp in zip(new["dcp 8"], best, strict=True)]
    assert ratios == pytest.approx([row.speedup.ours for row in rows], rel=1e-3)


@pytest.mark.slow
def test_the_stored_runs_come_out_again() -> None:
    _, stored = read()
    trace = agent_trace(stored["trace"]["num_requests"])
    for size in (1, 8):
        assert _summary(replay(trace, Cluster(dcp=size), 16)) == stored["runs"][f"dcp {size}"][0]


def test_the_texts_of_the_chapter_hold() -> None:
    """Sentences with a number in them, where the number comes from the stored runs."""
    rows, stored = read()
    tp, dcp = stored["runs"].values()
    assert [round(run["running"]) for run in tp[2:]] == [34] * 4
    assert [round(run["running"]) for run in dcp] == [16, 32, 64, 128, 256, 512]
    assert round(rows[-1].speedup.ours, 1) == 2.8 and round(rows[-1].speedup.post or math.nan, 1) == 3.3
