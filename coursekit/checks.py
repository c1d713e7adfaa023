"""What an exercise's check cells and hidden probes call: `expect` and `probe`.

    from coursekit.checks import expect
    expect("kv_bytes(layers=36, kv_heads=8)", lambda: kv_bytes(36, 8), 147456,
           mistakes={"only keys, or only values, counted": 73728}, hint="Keys and values are both stored.")

A check teaches: it says what was expected of which input, what came, and which usual mistake that looks like. It can be
talked out of its verdict by the code it runs beside, so points rest on probes, whose values are compared elsewhere.
"""

from __future__ import annotations

import json
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from typing import Any

from coursekit.compare import difference, plain, show, show_both

PROBE_PREFIX = "textbook-probe "
_MAX_PROBE_CHARS = 200_000
# Taken before any student code runs: names replaced by accident must not swallow a probe.
_STDOUT = sys.stdout
_DUMPS = json.dumps
# (an exception's class, words of its message, what that usually means in a student's function)
_USUALLY: tuple[tuple[type[Exception], str, str], ...] = (
    (FrozenInstanceError, "", "This object cannot be assigned to: dataclasses.replace makes a changed copy."),
    (ValueError, "empty", "min() and max() need an entry: deal with the empty case first, or give them a default."),
    (IndexError, "", "The list has fewer entries for this input than the code takes for granted."),
    (ZeroDivisionError, "", "The divisor is 0 for this input: deal with that case first."),
    (TypeError, "NoneType", "Something used here is None: is a `return` missing?"),
    (TypeError, "positional argument", "Keep the arguments as the stub has them."),
    (RuntimeError, "changed size", "Go over a copy, list(…), of what the loop changes."),
)
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
) -> None:
    """Say nothing where `got` is `want`; otherwise raise CheckFailed with a sentence a student can use.

    name: the call as a student would write it, with its inputs.
    got: better a lambda than a value: an unsolved part and an error inside it then become a sentence too.
    mistakes: a usual mistake in a few words ("GB instead of GiB") → the value it leads to. The likeliest come first:
        of several that lead to this value only the first is named.
    earlier: an earlier part whose answer this one calls → a call of `expect` for it, on the inputs that matter here.
        Where it fails, that is the sentence, and no diagnosis of this part.
    """
    value = plain(_call(name, got, hint, earlier))
    wanted = plain(want)
    clause = difference(value, wanted, rel_tol, abs_tol)
    if clause is None:
        return
    _mend_first(earlier)
    came, belongs = show_both(value, wanted)
    sentences = [f"{name} should be {belongs}, and came out as {came}."]
    if isinstance(wanted, (list, tuple, dict)) or type(value) is not type(wanted):
        sentences.append(f"First difference: {clause}.")
    tolerance = max(rel_tol, 1e-9)
    for label, wrong in (mistakes or {}).items():
        if difference(value, plain(wrong), tolerance, abs_tol) is None:
            sentences.append(f"This looks like: {label}.")
            break
    raise CheckFailed(" ".join([*sentences, hint]).strip()) from None


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
        raise CheckFailed(_unsolved(name, error)) from None
    except CheckFailed:
        raise
    except Exception as error:
        if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
            reason = f"{name} cannot be computed: {error}. Run the answer cells above first, and mind the spelling."
            raise CheckFailed(reason) from None
        _mend_first(earlier)
        sentences = [f"{name} raised {type(error).__name__}{_place(error, got)}: {error}."]
        sentences += [means for kind, words, means in _USUALLY if isinstance(error, kind) and words in str(error)]
        raise CheckFailed(" ".join([*sentences, hint]).strip()) from error


def _place(error: Exception, got: Callable[[], Any]) -> str:
    """The function of the notebook it was raised in, and the line; "" where there is none.

    Lambdas and comprehensions have no name worth telling, and what a dataclass was given has no line: the function
    around them stands for them.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, text = frame.f_code.co_name, linecache.getline(frame.f_code.co_filename, line).strip()
        if frame.f_globals is getattr(got, "__globals__", None) and text and not name.startswith("<"):
            place = f" in {name}, at `{text}`"
    return place


def _mend_first(earlier: Earlier | None) -> None:
    for part, check in (earlier or {}).items():
        try:
            check()
        except CheckFailed as failed:
            raise CheckFailed(f"Part {part} does not pass yet: mend it first. {failed}") from None


def _unsolved(name: str, error: NotImplementedError) -> str:
    line = str(error) or "write your answer in its place"  # the line of a stub says which part it belongs to
    return f"Not solved yet: {name} still raises NotImplementedError ({line}); hints are below."
