"""What a check says, and what a probe prints."""

from __future__ import annotations

import json
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from coursekit import checks
from coursekit.checks import CheckFailed, expect, expect_raises, probe, uses
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
        (None, 51, "None (is a `return` missing?), not 51"),
        ([1, 2, 4], [1, 2, 3], "[2]: 4, not 3"),
        ([1, 2], [1, 2, 3], "2 entries, not 3"),
        (3, [1, 2, 3], "a number came where a list of 3 belongs"),
        ((1, 2), {"a": 1}, "a tuple came where a dictionary belongs"),
        ({"a": (1,)}, {"a": {"b": 1}}, "['a']: a tuple came where a dictionary belongs"),
        (0.12249999999999997, 0.25, "0.1225, not 0.25"),
        ([0.123456789], [0.123456788], "[0]: 0.123456789, not 0.123456788"),
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
    assert plain((1, {2, 1})) == (1, [1, 2])
    assert plain({16, 2, 1}) == [1, 2, 16] and plain({"b", 1, "a"}) == ["a", "b", 1]
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
    assert said == "gib(8) should be 8, and came out as 8.59. This looks like: GB instead of GiB."
    said = message("gib(8)", lambda: 7.5, 8.0, mistakes={"GB instead of GiB": 8.59}, hint="2**30.")
    assert said == "gib(8) should be 8, and came out as 7.5. 2**30.", "the general hint, where no mistake is known"


@pytest.mark.parametrize(
    "came, want, is_it",
    [
        (14.16, 14.155776, True),
        (14.15, 14.155776, True),
        (0.46, 0.459686, True),
        ((0.837, 0.834), (0.83739, 0.833708), True),
        ((0.837, 0.5), (0.83739, 0.833708), False),
        (307.892, 307.8984, False),
        (0.5, 0.459686, False),
        (14.0, 14.0000001, True),
        (13.0, 14.2, False),
        (7.0, 7.5, False),
        (math.inf, 7.5, False),
    ],
)
def test_a_rounded_value_is_told_so(came: Any, want: Any, is_it: bool) -> None:
    said = message("f(1)", lambda: came, want)
    assert ("This looks like: a rounded value; return it with all its digits." in said) == is_it
    assert "rounded value" not in message("f(1)", lambda: came, want, mistakes={"GB instead of GiB": came})


def test_numbers_are_shown_with_as_many_digits_as_a_reader_needs() -> None:
    said = message("f(1)", lambda: {"gap": 0.12249999999999997, "n": (1.0, 15138790656.0)}, {"gap": 0.5, "n": (2, 3)})
    assert said.startswith(
        "f(1) should be {'gap': 0.5, 'n': (2, 3)}, and came out as {'gap': 0.1225, 'n': (1, 15138790"
    )
    assert "(1,)" in message("f(1)", (1.0,), (2,))
    assert message("f(1)", 0.3000000004, 0.3, rel_tol=0).startswith("f(1) should be 0.3, and came out as 0.3000000004")


def test_the_type_that_came_is_named() -> None:
    assert "First difference: a tuple came where a dictionary belongs." in message("f(1)", lambda: (1, 2), {"a": 1})


def test_of_several_mistakes_the_likeliest_is_named() -> None:
    said = message("f(1)", 3, 2, mistakes={"first": 4, "second": 3, "third": 3})
    assert "This looks like: second." in said and "third" not in said


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
    assert message("f(1)", lambda: None, 1) == "f(1) should be 1, and came out as None. Is a `return` missing?"
    assert "return" not in message("f(1)", lambda: None, 1, mistakes={"the row is not found": None})


def test_a_single_value_is_told_once() -> None:
    assert message("f(1)", lambda: 5799.74, 5799) == "f(1) should be 5799, and came out as 5799.74."


@pytest.mark.parametrize("came, says", [(7, "too high"), (1.5, "too low"), ("7", "wrong"), (True, "wrong")])
def test_a_wanted_number_can_be_kept_back(came: Any, says: str) -> None:
    said = message("f(1)", lambda: came, 6, mistakes={"doubled": 7}, hint="Think.", reveal=False)
    assert says in said and "6" not in said and ("doubled" in said) == (came == 7) == ("Think." not in said)


def test_a_name_missing_inside_a_function_is_not_an_answer_cell_not_run() -> None:
    space: dict[str, Any] = {}
    source = "def f(x):\n    return math.ceil(x)\n"
    linecache.cache["<answer-a>"] = (len(source), None, source.splitlines(True), "<answer-a>")
    exec(compile(source, "<answer-a>", "exec"), space)
    call = eval("lambda: f(1)", space)
    said = message("f(1)", call, 1)
    assert said.startswith("f(1) raised NameError in f, at `return math.ceil(x)`: name 'math' is not defined.")
    assert "is an import missing" in said and "Run the answer cells" not in said


def test_an_unsolved_earlier_part_is_told_in_one_line() -> None:
    said = message("f(1)", lambda: 3, 1, earlier={"a": lambda: expect("g(1)", _unsolved, 2)})
    assert said == "Not solved yet: this part uses part a, which is not solved yet. Solve part a first."


def test_uses_sees_what_a_function_calls() -> None:
    assert uses(lambda: forgets(1), "forgets") and not uses(lambda: 1, "forgets") and not uses(3, "forgets")


def test_one_entry_is_no_entries() -> None:
    assert difference([1], [1, 2]) == "1 entry, not 2"


def test_an_unsolved_part_is_named_even_where_another_calls_it() -> None:
    def stub() -> int:
        raise NotImplementedError("part b: write your answer in place of this line")

    said = message("f(1)", lambda: stub() + 1, 1)
    assert said.startswith("Not solved yet: f(1) still raises NotImplementedError (part b: write your answer")
    said = message("f(1)", lambda: stub() + 1, 1, earlier={"b": lambda: None})
    assert said == "Not solved yet: this part uses part b, which is not solved yet. Solve part b first."


@dataclass(frozen=True)
class Frozen:
    size: int = 1


def assigns(frozen: Any) -> None:
    frozen.size = 2


def changes_what_it_goes_over(names: dict[str, int]) -> None:
    for name in names:
        del names[name]


def forgets(value: int = 1) -> int:
    return value if value < 0 else forgets.missing  # type: ignore[attr-defined,no-any-return]


def calls_wrongly(value: int) -> int:
    return forgets(value, 2, 3)  # type: ignore[call-arg]


RAISES: list[tuple[Callable[[], Any], str]] = [
    (lambda: assigns(Frozen()), "FrozenInstanceError in assigns, at `frozen.size = 2`: cannot assign to field 'size'. "
                                "This object cannot be assigned to: dataclasses.replace"),
    (lambda: min([]), "deal with the empty case first"),
    (lambda: max([]), "deal with the empty case first"),
    (lambda: [][0], "IndexError: list index out of range. The list has fewer entries"),
    (lambda: 1 / 0, "ZeroDivisionError: division by zero. The divisor is 0"),
    (lambda: None + 1, "is a `return` missing?"),  # type: ignore[operator]
    (lambda: calls_wrongly(1), "raised TypeError in calls_wrongly, at `return forgets(value, 2, 3)"),
    (lambda: calls_wrongly(1), "calls a function with other arguments"),
    (lambda: [1].__getitem__(1.5), "// divides without a rest"),  # type: ignore[call-overload]
    (lambda: range(1.5), "// divides without a rest"),  # type: ignore[call-overload]
    (lambda: {[1]: 2}, "use the number or the name that is in it"),
    (lambda: [].pop(), "ask whether there is an entry"),
    (lambda: {"b": 1}["a"], "no such key"),
    (lambda: forgets(1, 2), "Keep the arguments as the stub has them."),  # type: ignore[call-arg]
    (lambda: changes_what_it_goes_over({"a": 1, "b": 2}), "in changes_what_it_goes_over, at `for name in names:`"),
    (lambda: changes_what_it_goes_over({"a": 1, "b": 2}), "Go over a copy"),
    (lambda: [1 / divisor for divisor in [0]], "f(1) raised ZeroDivisionError: division by zero."),
    (forgets, "f(1) raised AttributeError in forgets, at `return value if value < 0"),
]  # fmt: skip


@pytest.mark.parametrize("call, says", RAISES)
def test_what_is_raised_is_placed_and_explained_and_the_hint_is_kept(call: Callable[[], Any], says: str) -> None:
    said = message("f(1)", call, 1, hint="Think of the smallest input.")
    assert says in said and said.startswith("f(1) raised ") and said.endswith("Think of the smallest input.")


def test_a_variable_used_too_early_is_no_misspelt_name() -> None:
    def early() -> int:
        numbers: list[int] = []
        for number in numbers:
            total = number
        return total

    said = message("f(1)", early, 1)
    assert said.startswith("f(1) raised UnboundLocalError in early") and "answer cells above" not in said


@pytest.mark.parametrize("call", [lambda: 3, lambda: 1 / 0])
def test_an_earlier_part_that_is_wrong_is_to_be_mended_first(call: Callable[[], Any]) -> None:
    wrong = {"a": lambda: expect("g(1)", 1, 1), "b": lambda: expect("g(2)", 7, 2), "c": lambda: expect("g(3)", 7, 3)}
    said = message("f(1)", call, 1, mistakes={"GB": 3}, hint="Think.", earlier=wrong)
    assert said == "Part b does not pass yet: mend it first. g(2) should be 2, and came out as 7."
    assert "GB" in message("f(1)", lambda: 3, 1, mistakes={"GB": 3}, earlier={"a": lambda: expect("g(1)", 1, 1)})


def test_a_right_value_asks_nothing_of_the_earlier_parts() -> None:
    expect("f(1)", lambda: 1, 1, earlier={"a": lambda: expect("g(1)", 2, 1)})


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
