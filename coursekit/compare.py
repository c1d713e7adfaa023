"""Is this value the wanted one? The one comparison that checks (in the notebook) and probes (outside it) share."""

from __future__ import annotations

import math
from typing import Any

_MAX_SHOWN = 120


def plain(value: Any) -> Any:
    """The value in Python's own types: scalars and arrays as numbers and lists, sets as sorted lists."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (set, frozenset)):
        items = [plain(item) for item in value]
        try:
            return sorted(items)
        except TypeError:  # of several kinds: any order will do, if it is always the same
            return sorted(items, key=repr)
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if hasattr(value, "__float__"):  # Fraction, Decimal
        return float(value)
    return value


def show(value: Any, digits: int = 6) -> str:
    """A value for a sentence: short, and every float in it with that many significant digits."""
    try:
        text = _text(value, digits)
    except Exception:  # nested too deep, or a class of the student's own whose repr fails
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 30]} … ({len(text)} characters)"


def show_both(got: Any, want: Any) -> tuple[str, str]:
    """Both values, with as few digits as tell them apart."""
    pairs = [(show(got, digits), show(want, digits)) for digits in (6, 10, 17)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _text(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{max(digits, 15) if value.is_integer() else digits}g}"
    if type(value) is list:
        return f"[{', '.join(_text(item, digits) for item in value)}]"
    if type(value) is tuple:
        return f"({', '.join(_text(item, digits) for item in value)}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_text(item, digits)}' for key, item in value.items())}}}"
    return repr(value)


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 block", "2 blocks"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def difference(got: Any, want: Any, rel_tol: float = 1e-9, abs_tol: float = 0.0, where: str = "") -> str | None:
    """The first place where `got` is not `want`, as a clause ("[2]: 14, not 7"), or None where they agree.

    rel_tol, abs_tol: as in math.isclose, for numbers at any depth. Whole numbers are compared like any number, so
    51.0 is 51; a truth value is not a number. Recursion follows `want`, so a nested `got` cannot exhaust it.
    """
    at = f"{where}: " if where else ""
    if isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return f"{at}{_kind(got)} came where a list of {len(want)} belongs"
        if len(got) != len(want):
            return f"{at}{counted(len(got), 'entry', 'entries')}, not {len(want)}"
        pairs = [(f"{where}[{index}]", got[index], item) for index, item in enumerate(want)]
    elif isinstance(want, dict):
        if not isinstance(got, dict):
            return f"{at}{_kind(got)} came where a dictionary belongs"
        if set(got) != set(want):
            return f"{at}the keys {show(list(got))}, not {show(list(want))}"
        pairs = [(f"{where}[{key!r}]", got[key], item) for key, item in want.items()]
    else:
        return None if _same(got, want, rel_tol, abs_tol) else f"{at}{_clause(got, want)}"
    found = (difference(mine, item, rel_tol, abs_tol, place) for place, mine, item in pairs)
    return next((clause for clause in found if clause), None)


def is_rounded(got: Any, want: Any) -> bool:
    """Is `got` the wanted number (or the wanted list of numbers) with decimals rounded or cut off?"""
    if isinstance(want, (list, tuple)):
        alike = isinstance(got, (list, tuple)) and len(got) == len(want)
        return alike and all(difference(a, b) is None or is_rounded(a, b) for a, b in zip(got, want, strict=True))
    if not (isinstance(got, float) and isinstance(want, float)) or not math.isfinite(got) or want.is_integer():
        return False
    places = next((n for n in range(5) if round(got, n) == got), None)
    return places is not None and abs(got - want) < min(10.0**-places, 0.01 * abs(want))


def _same(got: Any, want: Any, rel_tol: float, abs_tol: float) -> bool:
    if _number(want):
        if not _number(got):
            return False
        if isinstance(got, int) and isinstance(want, int):
            return got == want or abs(got - want) <= max(rel_tol * max(abs(got), abs(want)), abs_tol)
        try:
            both_nan = math.isnan(got) and math.isnan(want)
            return both_nan or math.isclose(got, want, rel_tol=rel_tol, abs_tol=abs_tol)
        except OverflowError:  # a whole number beyond the range of floats
            return False
    return type(got) is type(want) and bool(got == want)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _clause(got: Any, want: Any) -> str:
    came, belongs = show_both(got, want)
    if got is None:
        return f"{_kind(got)}, not {belongs}"
    alike = type(got) is type(want) or (_number(got) and _number(want))
    return f"{came if alike else f'{_kind(got)} {came}'}, not {belongs}"


def _kind(value: Any) -> str:
    names = {"NoneType": "None (is a `return` missing?)", "str": "text", "int": "a number", "float": "a number"}
    names |= {"bool": "a truth value", "list": "a list", "dict": "a dictionary"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
