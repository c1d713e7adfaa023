"""What a check says, and what a probe prints."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from coursekit import checks
from coursekit.checks import CheckFailed, expect, expect_raises, probe
from coursekit.compare import difference, plain


@pytest.mark.parametrize(
    "got, want, clause",
    [
        (51, 51, None),
        (51.0, 51, None),
        (52, 51, "52, not 51"),
        (True, 1, "a truth value True, not 1"),
        (1, True, "a number 1, not True"),
        ("51", 51, "text '51', not 51"),
        (None, 51, "None (is a `return` missing?) None, not 51"),
        ([1, 2, 4], [1, 2, 3], "[2]: 4, not 3"),
        ([1, 2], [1, 2, 3], "2 entries, not 3"),
        (3, [1, 2, 3], "a number came where a list of 3 belongs"),
        ({"a": [1]}, {"a": [2]}, "['a'][0]: 1, not 2"),
        ({"b": 1}, {"a": 1}, "the keys ['b'], not ['a']"),
        (math.nan, math.nan, None),
        (math.nan, 1.0, "nan, not 1"),
        (math.inf, 1.0, "inf, not 1"),
    ],
)
def test_difference(got: Any, want: Any, clause: str | None) -> None:
    assert difference(got, want) == clause


def test_tolerances_are_those_of_isclose() -> None:
    assert difference(1.001, 1.0, rel_tol=1e-3) is None
    assert difference(1.002, 1.0, rel_tol=1e-3) is not None
    assert difference(1e-9, 0.0, abs_tol=1e-8) is None
    assert difference(1_000_001, 1_000_000, rel_tol=1e-5) is None
    assert difference(2**60 + 1, 2**60, rel_tol=0) is not None


def test_a_number_beyond_the_range_of_floats_is_just_wrong() -> None:
    assert difference(10**400, 1.5) is not None
    assert difference(10**400, 10**400) is None


def test_plain_takes_numpy_sets_and_fractions() -> None:
    assert plain(np.arange(3)) == [0, 1, 2]
    assert plain(np.float64(0.5)) == 0.5 and type(plain(np.float64(0.5))) is float
    assert plain((1, {2, 1})) == [1, [1, 2]]
    assert plain(Fraction(1, 4)) == 0.25
    assert plain(np.bool_(True)) is True


def test_a_nested_answer_cannot_exhaust_the_comparison() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert difference(deep, [[1]]) is not None


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckFailed) as caught:
        expect(*args, **kwargs)
    return str(caught.value)


def test_the_message_names_input_value_mistake_and_hint() -> None:
    said = message("gib(8)", lambda: 8.59, 8.0, rel_tol=1e-3, mistakes={"GB instead of GiB": 8.59}, hint="2**30.")
    assert said == "gib(8) should be 8, and came out as 8.59. This looks like: GB instead of GiB. 2**30."


def test_a_mistake_that_was_not_made_is_not_mentioned() -> None:
    assert "GiB" not in message("gib(8)", lambda: 7.0, 8.0, mistakes={"GB instead of GiB": 8.59})


def test_the_right_value_passes_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    expect("f(1)", lambda: 0.1 + 0.2, 0.3)
    expect("f(1)", np.array([1, 2]), [1, 2])
    assert capsys.readouterr().out == ""


def test_unsolved_unnamed_and_raising_answers_become_sentences() -> None:
    def unsolved() -> int:
        raise NotImplementedError

    assert message("f(1)", unsolved, 1).startswith("Not solved yet: f(1)")
    assert "name 'f' is not defined" in message("f(1)", lambda: eval("f(1)", {}), 1)
    assert message("f(0)", lambda: 1 / 0, 1) == "f(0) raised ZeroDivisionError: division by zero"
    assert "is a `return` missing?" in message("f(1)", lambda: None, 1)


def test_the_notebook_shows_one_paragraph() -> None:
    with pytest.raises(CheckFailed) as caught:
        expect("f(1)", 2, 1)
    assert caught.value._render_traceback_() == ["✗ f(1) should be 1, and came out as 2."]


def test_expect_raises() -> None:
    expect_raises("f(-1)", lambda: [][1], IndexError)
    with pytest.raises(CheckFailed, match="should raise ValueError, and returned 3"):
        expect_raises("f(-1)", lambda: 3, ValueError)
    with pytest.raises(CheckFailed, match="and raised IndexError"):
        expect_raises("f(-1)", lambda: [][1], ValueError)
    with pytest.raises(CheckFailed, match="Not solved yet"):
        expect_raises("f(-1)", _unsolved, ValueError)


def _unsolved() -> None:
    raise NotImplementedError


def printed(monkeypatch: pytest.MonkeyPatch, **values: Any) -> Any:
    lines: list[str] = []
    stream = type("Stream", (), {"write": lambda _, text: lines.append(text), "flush": lambda _: None})()
    monkeypatch.setattr(checks, "_STDOUT", stream)
    probe(**values)
    (line,) = "".join(lines).split("\n")[1:-1]
    return json.loads(line.removeprefix(checks.PROBE_PREFIX))


def test_a_probe_is_one_json_line_and_one_error_spoils_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": lambda: np.int64(3), "b": lambda: 1 / 0, "c": [1.5], "d": lambda: object()}
    assert printed(monkeypatch, **values) == {
        "a": 3, "b": {"error": "ZeroDivisionError"}, "c": [1.5], "d": {"error": "TypeError"},
    }  # fmt: skip


def test_a_probe_is_never_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, a="x" * 10**6) == {"a": {"error": "TooLong"}}
