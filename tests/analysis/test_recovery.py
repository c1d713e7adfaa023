"""Recovery points, replayed windows, and the stack in which a replay is seen to differ."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.analysis import (
    KDA_SNAPSHOT_BYTES,
    AnalysisError,
    MiB,
    PrefixIdentity,
    WindowedModel,
    long_lived_share,
    recomputed_tokens,
    recovery_point,
    snapshot_plan,
    why_not_resumable,
)
from mini_engine.analysis.windowed import WindowedStack
from mini_engine.cache_key import CacheKey


@pytest.mark.parametrize(
    "matched, snapshots, point",
    [(10_752, (4096, 8192), 8192), (10_752, (4096, 8192, 12_288), 8192), (4096, (4096,), 4096), (100, (4096,), 0)],
)
def test_the_recovery_point(matched: int, snapshots: tuple[int, ...], point: int) -> None:
    assert recovery_point(matched, snapshots) == point
    assert recomputed_tokens(matched, snapshots) == matched - point


@given(tokens=st.integers(1, 300), spacing=st.integers(1, 60))
def test_spacing_against_memory(tokens: int, spacing: int) -> None:
    plan = snapshot_plan(tokens, spacing, snapshot_bytes=7)
    again = [recomputed_tokens(matched, plan.positions) for matched in range(1, tokens + 1)]
    assert plan.num_bytes == 7 * len(plan.positions)
    assert (plan.worst_recomputed, plan.mean_recomputed) == (max(again), pytest.approx(sum(again) / tokens))
    assert plan.worst_recomputed < spacing


def test_denser_snapshots_cost_memory() -> None:
    sparse, dense = snapshot_plan(131_072, 65_536), snapshot_plan(131_072, 4096)
    assert [len(sparse.positions), len(dense.positions)] == [2, 32]
    assert [sparse.num_bytes / MiB, dense.num_bytes / MiB] == pytest.approx([107.2, 1715.2])
    assert sparse.mean_recomputed / dense.mean_recomputed == pytest.approx(16, rel=0.001)
    assert 53.6 * MiB == KDA_SNAPSHOT_BYTES


V41 = WindowedModel()


@pytest.mark.parametrize(
    "global_kv, encoder_window, path, replayed",
    [
        (True, True, "continue", 0),
        (True, False, "replay", 128),
        (False, True, "recompute", 10_000),
        (False, False, "recompute", 10_000),
    ],
)
def test_three_paths(global_kv: bool, encoder_window: bool, path: str, replayed: int) -> None:
    taken = V41.resume(10_000, 500, global_kv=global_kv, encoder_window=encoder_window)
    assert (taken.path, taken.encoder_replayed, taken.encoder_tokens) == (path, replayed, replayed + 500)
    assert taken.decoder_token_layers == 128 * 20  # on every path: a full hit does not save it
    assert taken.encoder_exact == (path != "replay")


def test_short_prefixes_are_replayed_whole() -> None:
    taken = V41.resume(100, 10, global_kv=True, encoder_window=False)
    assert (taken.encoder_replayed, taken.decoder_replayed, taken.encoder_exact) == (100, 110, True)
    assert V41.resume(0, 10, global_kv=True, encoder_window=True).path == "recompute"


def test_three_lifetimes_and_forty_layers() -> None:
    assert V41.resident_layers == 40
    places = {lifetime.state: lifetime.place for lifetime in V41.lifetimes()}
    assert places == {"decoder window": "accelerator", "encoder window": "host DRAM", "global KV": "prefix cache"}
    assert sum(lifetime.num_layers or 0 for lifetime in V41.lifetimes()) == 40


def test_an_eighth_of_the_long_lived_cache() -> None:
    assert long_lived_share() == Fraction(1, 8)
    assert long_lived_share(window_share=Fraction(1, 10)) == Fraction(9, 40)  # another workload, another share


KEPT = PrefixIdentity(CacheKey("m@1", None, "rope", "bf16"), (1, 2, 3))


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"key": KEPT.key._replace(model="m@2")}, "model: 'm@1' was kept, 'm@2' is wanted"),
        ({"key": KEPT.key._replace(adapter="a")}, "adapter: None was kept"),
        ({"key": KEPT.key._replace(position_rule="yarn")}, "position rule"),
        ({"key": KEPT.key._replace(kv_format="fp8")}, "kv format"),
        ({"first_position": 5}, "first position: 0 was kept, 5 is wanted"),
        ({"tokens": (1, 9, 3)}, "tokens: equal up to 1 only, of 3 kept and 3 wanted"),
        ({"tokens": (1, 2)}, "tokens: equal up to 2 only, of 3 kept and 2 wanted"),
    ],
)
def test_when_recovery_is_not_legal(changed: dict, says: str) -> None:
    wanted = PrefixIdentity(**{**vars(KEPT), **changed})
    (reason,) = why_not_resumable(KEPT, wanted)
    assert says in reason
    assert why_not_resumable(KEPT, KEPT) == ()
    assert len(why_not_resumable(KEPT, wanted, inputs_available=False)) == 2


def tokens(length: int, width: int = 8) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(length, width))


@pytest.mark.parametrize("window", [2, 5])
def test_one_layer_is_restored_by_its_window(window: int) -> None:
    stack = WindowedStack.random(layers=1, window=window)
    assert stack.replay_error(tokens(30), replay=window) == pytest.approx(0, abs=1e-12)


def test_stacked_layers_differ_after_a_replayed_window() -> None:
    error = WindowedStack.random(layers=4, window=5).replay_error(tokens(40), replay=5)
    assert error[0] == pytest.approx(0, abs=1e-12)
    assert (error[1:] > 0.01).all()


@pytest.mark.parametrize("layers, window", [(1, 4), (2, 4), (3, 2), (4, 5)])
def test_the_reach_is_layers_times_window(layers: int, window: int) -> None:
    stack = WindowedStack.random(layers, window)
    assert stack.reach == layers * (window - 1)
    assert stack.replay_error(tokens(40), stack.reach) == pytest.approx(0, abs=1e-12)
    if layers > 1:
        assert stack.replay_error(tokens(40), stack.reach - 1)[-1] > 1e-9
    # What lies beyond the reach does not matter, and what lies at its edge does.
    changed = tokens(40)
    changed[: 40 - stack.reach] = 0
    assert stack.state(changed) == pytest.approx(stack.state(tokens(40)), abs=1e-12)
    changed[40 - stack.reach] += 1
    assert np.abs(stack.state(changed)[-1] - stack.state(tokens(40))[-1]).max() > 1e-10


def test_attention_looks_back_a_window_and_not_ahead() -> None:
    """Softmax weights written out for one layer's output, seen as the second layer's state."""
    stack, x = WindowedStack.random(layers=2, window=3, width=4), tokens(6, 4)
    query, key, value = stack.mixing[0]
    for place, position in ((0, 4), (1, 5)):
        scores = [float((x[position] @ query) @ (x[j] @ key)) for j in range(position - 2, position + 1)]
        weights = np.exp(scores) / np.exp(scores).sum()
        out = sum(weight * (x[j] @ value) for weight, j in zip(weights, range(position - 2, position + 1), strict=True))
        assert stack.state(x)[1][place] == pytest.approx(x[position] + out)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: recovery_point(-1, ()), "matched"),
        (lambda: snapshot_plan(10, 0), "spacing must be a whole number of at least 1, got 0"),
        (lambda: V41.resume(5, 0, global_kv=True, encoder_window=True), "new must be"),
        (lambda: long_lived_share(Fraction(3, 2)), "shares lie in"),
        (lambda: WindowedStack.random(2, 5).state(tokens(3)), "3 tokens do not fill a window of 5"),
    ],
)
def test_what_cannot_be_is_refused(call, says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        call()
