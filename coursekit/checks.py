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

from coursekit.compare import difference, plain, show

PROBE_PREFIX = "textbook-probe "
_MAX_PROBE_CHARS = 200_000
# Taken before any student code runs: names replaced by accident must not swallow a probe.
_STDOUT = sys.stdout
_DUMPS = json.dumps


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
) -> None:
    """Say nothing where `got` is `want`; otherwise raise CheckFailed with a sentence a student can use.

    name: the call as a student would write it, with its inputs.
    got: better a lambda than a value: an unsolved part and an error inside it then become a sentence too.
    mistakes: a usual mistake in a few words ("GB instead of GiB") → the value it leads to.
    """
    value = plain(_call(name, got))
    wanted = plain(want)
    clause = difference(value, wanted, rel_tol, abs_tol)
    if clause is None:
        return
    sentences = [f"{name} should be {show(wanted)}, and came out as {show(value)}."]
    if isinstance(wanted, (list, tuple, dict)) or type(value) is not type(wanted):
        sentences.append(f"First difference: {clause}.")
    sentences += [
        f"This looks like: {label}."
        for label, wrong in (mistakes or {}).items()
        if difference(value, plain(wrong), max(rel_tol, 1e-9), abs_tol) is None
    ]
    sentences.append(hint)
    raise CheckFailed(" ".join(sentence for sentence in sentences if sentence)) from None


def expect_raises(name: str, call: Callable[[], Any], error: type[Exception], *, hint: str = "") -> None:
    """The call must refuse its input with `error`."""
    try:
        value = call()
    except NotImplementedError:
        raise CheckFailed(_unsolved(name)) from None
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


def _call(name: str, got: Any) -> Any:
    if not callable(got):
        return got
    try:
        return got()
    except NotImplementedError:
        raise CheckFailed(_unsolved(name)) from None
    except NameError as error:
        reason = f"{name} cannot be computed: {error}. Run this part's answer cell first, and mind the spelling."
        raise CheckFailed(reason) from None
    except CheckFailed:
        raise
    except Exception as error:
        raise CheckFailed(f"{name} raised {type(error).__name__}: {error}") from error


def _unsolved(name: str) -> str:
    return f"Not solved yet: {name} still raises NotImplementedError. Write your answer in its place; hints are below."
