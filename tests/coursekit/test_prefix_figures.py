"""What the pictures of chapter 05 say in words and bars agrees with the figures they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from coursekit.figures.kept import policy_hits, same_space, value_lines
from coursekit.figures.prefixes import (
    EQUAL,
    FOUND,
    OTHER,
    found_blocks,
    hits_by_pool,
    reusable_and_hit,
    round_tree,
    ways_on,
)
from coursekit.figures.recovery import recovery_line, replay_errors, resume_paths, spacing_tradeoff
from mini_engine.analysis import KeptPrefix, MiB, WindowedModel, append_turn, best_kept, summary_turn
from mini_engine.simulator.twelve_rounds import ROUND_PROMPTS, common_prefixes

matplotlib = pytest.importorskip("matplotlib")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def widths(axes, shade: str) -> list[float]:
    return [bar.get_width() for bar in axes.patches if bar.get_facecolor() == matplotlib.colors.to_rgba(shade)]


def heights(axes, shade: str | None = None) -> list[float]:
    face = None if shade is None else matplotlib.colors.to_rgba(shade)
    return [bar.get_height() for bar in axes.patches if face is None or bar.get_facecolor() == face]


def all_widths(axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches]


def xs(line) -> list[float]:
    return list(line.get_xdata())


def ys(line) -> list[float]:
    return list(line.get_ydata())


def kept(name: str, mib: int, recompute: float, fetch: float, chance: float = 0.5) -> KeptPrefix:
    return KeptPrefix(name, mib * MiB, chance, recompute, fetch, fetch)


@pytest.mark.parametrize("common, found, size", [(100, 96, 16), (0, 0, 16), (160, 144, 16), (100, 64, 64)])
def test_found_blocks_divide_the_prompt(common: int, found: int, size: int) -> None:
    figure = found_blocks(160, common, found, size)
    parts = [sum(widths(figure.axes[0], shade)) for shade in (FOUND, EQUAL, OTHER)]
    assert parts == [found, common - found, 160 - common]
    said = words(figure)
    assert all(any(word.endswith(f": {part}") for word in said) == bool(part) for part in parts)


def test_the_tree_says_new_tokens_and_lengths() -> None:
    said = words(round_tree(ROUND_PROMPTS[:4], common_prefixes()[:4]))
    assert "round 0: +206 new, then 4 of its own" in said and "round 2: +354 new, then 4 of its own" in said
    assert "round 3: +218 new" in said, "the last round has no one to leave its path"
    assert "All rounds begin with the same 206 tokens" in said and "884 in all" in said


def test_reusable_and_hit_are_two_bars_of_each_round() -> None:
    figure = reusable_and_hit([10, 30], [0, 6], {"large": [0, 4], "small": [0, 0]})
    large, small = figure.axes
    assert heights(large, EQUAL) == [0, 6] and heights(large, FOUND) == [0, 4]
    assert "small: 0 of 40 prompt tokens found" in words(figure) and small.get_ylim() == large.get_ylim()


def test_hits_by_pool_are_shares() -> None:
    figure = hits_by_pool([10, 20], {"a": [0, 50]}, total=200, marks=[10], title="shares")
    line = figure.axes[0].lines[0]
    assert ys(line) == [0, 25] and "a" in words(figure)


def test_ways_on_are_to_scale() -> None:
    figure = ways_on({"append": append_turn(8192, 1024), "summarise": summary_turn(8192, 2048, 1024)})
    assert widths(figure.axes[0], FOUND) == [8192, 0]
    assert {"8,192", "1,024", "3,088", "2,048", "then every token reads 3,072"} <= set(words(figure))


def test_recovery_line_and_spacing() -> None:
    figure = recovery_line(10_752, [4096, 8192], 8192)
    assert widths(figure.axes[0], FOUND) == [8192] and widths(figure.axes[0], EQUAL) == [2560]
    assert "2,560 computed again" in words(figure) and "snapshot 8,192" in words(figure)
    assert "computed again" not in " ".join(words(recovery_line(8192, [4096, 8192], 8192)))
    assert {"429", "2,048"} <= set(words(spacing_tradeoff([2048, 4096], [858, 429], [1024, 2047.5], mark=4096)))


def test_each_path_shows_what_runs() -> None:
    model = WindowedModel()
    paths = {
        name: model.resume(8192, 1024, global_kv=kv, encoder_window=window)
        for name, kv, window in (("all", True, True), ("half", True, False), ("none", False, False))
    }
    figure = resume_paths(paths, 8192)
    said = words(figure)
    assert said.count("128 tokens ×\n20 layers") == 3, "the decoder's replay is on every path"
    assert said.count("1,024 new") == 3 and said.count("found") == 2
    assert "128 again" in said and "8,192 again" in said


def test_replay_errors_name_every_curve_apart() -> None:
    figure = replay_errors({8: np.array([0, 2.0]), 16: np.array([0, 2.01]), 24: np.array([0, 0.0])})
    labels = [text for text in figure.axes[0].texts if "replayed" in text.get_text()]
    assert [label.get_text() for label in labels] == [f"{n} tokens replayed" for n in (8, 16, 24)]
    places = sorted(label.get_position()[1] for label in labels)
    assert min(np.diff(places)) > 0.1


def test_value_lines_cross_zero_at_their_thresholds() -> None:
    prefixes = {"fast": kept("x", 10, 0.3, 0.01), "slow": kept("y", 10, 0.3, 0.4)}
    figure = value_lines(prefixes, probability=0.5)
    said = words(figure)
    assert "fast: from 3.4% on" in said and "slow: never" in said
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [xs(dot)[0] for dot in dots] == pytest.approx([0.01 / 0.29])
    assert "135.0" in said and "-450.0" in said  # 0.5 · 290 − 10 and 0.5 · (−100) − 400, in ms
    assert "135.0" not in words(value_lines(prefixes))


def test_same_space_adds_up() -> None:
    one, three = kept("A", 864, 0.3, 0.01), [kept(f"B{i}", 288, 0.1, 0.005) for i in range(3)]
    figure = same_space({"one": best_kept([one], 864 * MiB), "three": best_kept(three, 864 * MiB)}, 864)
    assert sum(all_widths(figure.axes[0])) == 2 * 864
    assert {"saves 135.0 ms", "saves 127.5 ms", "B1\n42.5 ms"} <= set(words(figure))


def test_policy_hits_stand_under_their_bound() -> None:
    figure = policy_hits([6, 8], {"lru": [0.5, 0.7], "fifo": [0.4, 0.6]}, [0.8, 0.9])
    assert sorted(heights(figure.axes[0])) == pytest.approx([40, 50, 60, 70])
    assert {"50.0", "bound\n90.0", "6 GiB"} <= set(words(figure))
