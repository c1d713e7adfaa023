"""What is said of an exception in a student's function: where it was raised, and what that usually means."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import FrozenInstanceError
from typing import Any

_WHOLE = "A whole number is needed here: // divides without a rest, / gives a float."
_CALLED = "The line calls a function with other arguments than that function takes."
# (an exception's class, words of its message, what that usually means in a student's function)
_USUALLY: tuple[tuple[type[Exception], str, str], ...] = (
    (FrozenInstanceError, "", "This object cannot be assigned to: dataclasses.replace makes a changed copy."),
    (ValueError, "empty", "min() and max() need an entry: deal with the empty case first, or give them a default."),
    (IndexError, "pop from empty", "The list is empty here: ask whether there is an entry before you take one."),
    (IndexError, "", "The list has fewer entries for this input than the code takes for granted."),
    (KeyError, "", "There is no such key in this dictionary (not yet, or not any more)."),
    (ZeroDivisionError, "", "The divisor is 0 for this input: deal with that case first."),
    (TypeError, "NoneType", "Something used here is None: is a `return` missing?"),
    (TypeError, "cannot be interpreted as an integer", _WHOLE),
    (TypeError, "must be integers or slices, not float", _WHOLE),
    (TypeError, "multiply sequence by non-int", _WHOLE),
    (TypeError, "unhashable", "A list cannot be a key or an entry of a set: use the number or the name that is in it."),
    (RuntimeError, "changed size", "Go over a copy, list(…), of what the loop changes."),
)
_ARGUMENTS = ("positional argument", "keyword argument", "keyword-only argument", "multiple values for argument")


def raised(what: str, error: Exception, scope: object) -> str:
    """ "f(3) raised IndexError in f, at `return x[3]`: list index out of range. The list has fewer entries …".

    what: the call, as a student would write it. scope: the globals of the notebook (`function.__globals__`).
    """
    place = _place(error, scope)
    return " ".join([f"{what} raised {type(error).__name__}{place}: {error}.", *_means(error, bool(place))])


def is_unknown_to_the_check(error: Exception, scope: object) -> bool:
    """The check itself names something that is not there: an answer cell has not run, or a name is misspelt."""
    return isinstance(error, NameError) and not isinstance(error, UnboundLocalError) and not _place(error, scope)


def _means(error: Exception, inside: bool) -> list[str]:
    text = str(error)
    if isinstance(error, TypeError) and any(words in text for words in _ARGUMENTS):
        return [_CALLED if inside else "Keep the arguments as the stub has them."]
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
        return ["The function uses a name that is not there: is an import missing, or an answer cell above not run?"]
    found = (means for kind, words, means in _USUALLY if isinstance(error, kind) and words in text)
    return [means for means in [next(found, "")] if means]


def _place(error: Exception, scope: object) -> str:
    """The function of the notebook it was raised in, and the line; "" where there is none.

    Lambdas and comprehensions have no name worth telling, and what a dataclass was given has no line: the function
    around them stands for them.
    """
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, text = frame.f_code.co_name, linecache.getline(frame.f_code.co_filename, line).strip()
        if frame.f_globals is scope and text and not name.startswith("<"):
            place = f" in {name}, at `{text}`"
    return place


def scope_of(function: Any) -> object:
    """The globals a function was written among; None for what has none."""
    return getattr(function, "__globals__", None)
