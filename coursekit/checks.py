"""What an exercise's check cells and hidden probes call: `expect` and `probe`.

    from coursekit.checks import expect
    expect("kv_bytes(layers=36, kv_heads=8)", lambda: kv_bytes(36, 8), 147456,
           mistakes={"only keys, or only values, counted": 73728}, hint="Keys and values are both stored.")

A check teaches: it says what was expected of which input, what came, and which usual mistake that looks like. It can be
talked out of its verdict by the code it runs beside, so points rest on probes, whose values are compared elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from coursekit.compare import difference, is_rounded, plain, show, show_both
from coursekit.raised import is_unknown_to_the_check, raised, scope_of

PROBE_PREFIX = "textbook-probe "
_MAX_PROBE_CHARS = 200_000
# Taken before any student code runs: names replaced by accident must not swallow a probe.
_STDOUT = sys.stdout
_DUMPS = json.dumps
UNSOLVED = "Not solved yet"
Earlier = Mapping[str, Callable[[], Any]]


class CheckFailed(AssertionError):
    """A check's verdict. The notebook shows its one paragraph in place of a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks the exception how to show it
        return [f"✗ {self}"]


def expect(
    name: str,
    got: Any,
    want: Any,
    *,
    rel_tol: float = 1e-9,
    abs_tol: float = 0.0,
    mistakes: Mapping[str, Any] | None = None,
    hint: str = "",
    earlier: Earlier | None = None,
    reveal: bool = True,
) -> None:
    """Say nothing where `got` is `want`; otherwise raise CheckFailed with a sentence a student can use.

    name: the call as a student would write it, with its inputs.
    got: better a lambda than a value: an unsolved part and an error inside it then become a sentence too.
    mistakes: a usual mistake in a few words ("GB instead of GiB") → the value it leads to. The likeliest come first:
        of several that lead to this value only the first is named.
    hint: for a value that no mistake leads to. Where one does, its words are the hint: a general one might contradict.
    earlier: an earlier part whose answer this one calls → a call of `expect` for it, on the inputs that matter here.
        Where it fails, that is the sentence, and no diagnosis of this part.
    reveal: False keeps `want`, a number, to itself: the sentence says too high or too low.
    """
    value = plain(_call(name, got, hint, earlier))
    wanted = plain(want)
    clause = difference(value, wanted, rel_tol, abs_tol)
    if clause is None:
        return
    _mend_first(earlier)
    sentences = [_verdict(name, value, wanted, reveal)]
    if isinstance(wanted, (list, tuple, dict)):
        sentences.append(f"First difference: {clause}.")
    elif value is None and None not in (mistakes or {}).values():  # where None may be meant, a mistake says so
        sentences.append("Is a `return` missing?")
    label = _looks_like(value, wanted, mistakes or {}, max(rel_tol, 1e-9), abs_tol)
    sentences.append(f"This looks like: {label}." if label else hint)
    raise CheckFailed(" ".join(sentences).strip()) from None


def expect_raises(name: str, call: Callable[[], Any], error: type[Exception], *, hint: str = "") -> None:
    """The call must refuse its input with `error`."""
    try:
        value = call()
    except NotImplementedError as unsolved:
        raise CheckFailed(_unsolved(name, unsolved)) from None
    except error:
        return
    except Exception as other:
        came = f"and raised {type(other).__name__} ({other})"
    else:
        came = f"and returned {show(value)}"
    raise CheckFailed(f"{name} should raise {error.__name__}, {came}. {hint}".rstrip()) from None


def probe(**values: Any) -> None:
    """Print the values as one JSON line, for comparison outside this kernel. Callables are called, each on its own:
    an exception in one becomes {"error": its class} and does not spoil the others."""
    line = _DUMPS({name: _probed(value) for name, value in values.items()})
    if len(line) > _MAX_PROBE_CHARS:
        line = _DUMPS({name: {"error": "TooLong"} for name in values})
    _STDOUT.write(f"\n{PROBE_PREFIX}{line}\n")
    _STDOUT.flush()


def restore_output() -> None:
    """Give what is printed back to the notebook. Jupyter readies only the current `sys.stdout` for each cell, so this
    takes effect from the next cell on: it is a cell of its own before the probes."""
    sys.stdout = _STDOUT


def _probed(value: Any) -> Any:
    try:
        value = plain(value() if callable(value) else value)
        _DUMPS(value)
        return value
    except Exception as error:
        return {"error": type(error).__name__}


def _call(name: str, got: Any, hint: str, earlier: Earlier | None) -> Any:
    if not callable(got):
        return got
    try:
        return got()
    except NotImplementedError as error:
        first = [part for part in earlier or {} if str(error).startswith(f"part {part}:")]  # the stub says whose it is
        raise (_solve_first(first[0]) if first else CheckFailed(_unsolved(name, error))) from None
    except CheckFailed:
        raise
    except Exception as error:
        scope = scope_of(got)
        if is_unknown_to_the_check(error, scope):
            reason = f"{name} cannot be computed: {error}. Run the answer cells above first, and mind the spelling."
            raise CheckFailed(reason) from None
        _mend_first(earlier)
        raise CheckFailed(f"{raised(name, error, scope)} {hint}".strip()) from error


def _verdict(name: str, value: Any, wanted: Any, reveal: bool) -> str:
    came, belongs = show_both(value, wanted)
    if reveal:
        return f"{name} should be {belongs}, and came out as {came}."
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (
        f"{name} came out as {came}, which is {('too high' if value > wanted else 'too low') if numbers else 'wrong'}."
    )


def _looks_like(value: Any, wanted: Any, mistakes: Mapping[str, Any], rel_tol: float, abs_tol: float) -> str:
    for label, wrong in mistakes.items():
        if difference(value, plain(wrong), rel_tol, abs_tol) is None:
            return label
    return "a rounded value; return it with all its digits" if is_rounded(value, wanted) else ""


def _mend_first(earlier: Earlier | None) -> None:
    for part, check in (earlier or {}).items():
        try:
            check()
        except CheckFailed as failed:
            raise mend_first(part, failed) from None


def mend_first(part: str, failed: CheckFailed) -> CheckFailed:
    """What a later part says while an earlier one it builds on fails."""
    if str(failed).startswith(UNSOLVED):
        return _solve_first(part)
    return CheckFailed(f"Part {part} does not pass yet: mend it first. {failed}")


def _solve_first(part: str) -> CheckFailed:
    return CheckFailed(f"{UNSOLVED}: this part uses part {part}, which is not solved yet. Solve part {part} first.")


def uses(function: Any, name: str) -> bool:
    """Does the code of the function itself (not of one inside it) name this global?"""
    return name in getattr(getattr(function, "__code__", None), "co_names", ())


def _unsolved(name: str, error: NotImplementedError) -> str:
    line = str(error) or "write your answer in its place"  # the line of a stub says which part it belongs to
    return f"{UNSOLVED}: {name} still raises NotImplementedError ({line}). The notebook has a hint."
