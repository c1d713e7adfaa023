"""Exercise 10-1: is this the merge of attention states, and if not, which other rule is it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from coursekit.checks import CheckFailed, expect
from coursekit.compare import plain

State = tuple[list[float], float]
_HINT = (
    "Each part weighs exp(lse). A part without tokens is left out. Adding the same number to every lse does not change "
    "the values: only differences matter."
)
_OFFSET = "subtract the largest lse first, and add it again to the result"


def merged(parts: Sequence[State], log_base: float = math.e) -> State:
    """The state over the keys of all parts. log_base: what the parts' lse are powers of."""
    held = [(values, lse) for values, lse in parts if lse > -math.inf]
    if not held:
        return [0.0] * len(parts[0][0]), -math.inf
    top = max(lse for _, lse in held)
    weights = [log_base ** (lse - top) for _, lse in held]
    return _mean(held, weights), top + math.log(sum(weights), log_base)


def check_merge(came: Callable[[], Any], parts: Sequence[State]) -> None:
    """Raise CheckFailed, with the mistake it looks like, unless `came()` is the merge of `parts`."""
    name, want = f"merge({_said(parts)})", merged(parts)
    held = [values for values, lse in parts if lse > -math.inf]
    top = max(lse for _, lse in parts)
    filled: list[State] = [(values, lse) if lse > -math.inf else ([0.0] * len(values), 0.0) for values, lse in parts]
    zeros = [values for values, _ in filled]
    mistakes: dict[str, Sequence[float]] = {
        "an empty part taken for lse 0; it is minus infinity, and weighs nothing": merged(filled)[0],
        "lse read as a power of 2; it is a natural logarithm": merged(parts, 2.0)[0],
        "a base-2 lse read as natural": merged([(values, lse / math.log(2)) for values, lse in parts])[0],
        "the plain mean of all parts; each weighs exp(lse)": _mean([(v, 0.0) for v in zeros], [1.0] * len(zeros)),
        "the sum of the parts": [math.fsum(column) for column in zip(*zeros, strict=True)],
    }
    if held:
        label = "the plain mean of the parts that hold something; each weighs exp(lse)"
        mistakes[label] = _mean([(v, 0.0) for v in held], [1.0] * len(held))
        mistakes["weighed, and not divided by the sum of the weights"] = _unnormalised(parts, want)
        mistakes["weighed by lse itself, not by exp(lse)"] = _by_lse(parts)
        mistakes["only the part with the largest lse"] = max(parts, key=lambda part: part[1])[0]
    if top > 700:
        label = f"exp of a large lse overflows, and inf / inf is NaN: {_OFFSET}"
        mistakes = {label: [math.nan] * len(want[0]), **mistakes}
    if any(math.isnan(value) for values, _ in parts for value in values):
        label = "0 times NaN is NaN: what an empty part holds must not be read at all"
        mistakes = {label: [math.nan] * len(want[0]), **mistakes}
    differing = {label: values for label, values in mistakes.items() if not _near(values, want[0])}
    expect(f"{name}[0]", lambda: _state(name, came)[0], want[0], rel_tol=1e-6, mistakes=differing, hint=_HINT)
    whole = {} if held else {"an empty result has lse -inf; an lse of 0 claims to have seen something of weight 1": 0.0}
    whole |= {
        "the lse of the largest part": top,
        "the sum of the lse": sum(lse for _, lse in parts),
        "the sum of weights, without the logarithm": math.exp(min(want[1], 700.0)),
        "the logarithm without the offset that was taken out": want[1] - top,
        "the logarithm to base 2": want[1] / math.log(2),
        "the logarithm of the sum is to base 2; lse is a natural one": top + (want[1] - top) / math.log(2),
    }
    whole = {label: value for label, value in whole.items() if value != want[1] and not math.isnan(value)}
    hint = "The lse of the whole is log(exp(lse) + exp(lse) + …) over the parts."
    expect(f"{name}[1]", lambda: _state(name, came)[1], want[1], rel_tol=1e-6, mistakes=whole, hint=hint)


def _state(name: str, came: Callable[[], Any]) -> tuple[Any, Any]:
    try:
        value = plain(came())
    except OverflowError:
        reason = f"exp of a large lse overflows: {_OFFSET}"
        raise CheckFailed(f"{name} raised OverflowError: {reason}.") from None
    two = isinstance(value, (list, tuple)) and len(value) == 2
    if value is not None and not (two and isinstance(value[0], (list, tuple)) and isinstance(value[1], (int, float))):
        raise CheckFailed(f"{name}: merge must return two things: a list of values, and one lse.")
    return (value[0], value[1]) if two else (None, None)


def _mean(parts: Sequence[State], weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    columns = range(len(parts[0][0]))
    return [sum(w * values[i] for w, (values, _) in zip(weights, parts, strict=True)) / total for i in columns]


def _unnormalised(parts: Sequence[State], whole: State) -> list[float]:
    """The weighted sum: weights are exp(lse - top), whose sum is exp(lse of the whole - top)."""
    total = math.exp(whole[1] - max(lse for _, lse in parts))
    return [value * total for value in whole[0]]


def _by_lse(parts: Sequence[State]) -> list[float]:
    held = [(values, lse) for values, lse in parts if lse > -math.inf]
    total = sum(lse for _, lse in held)
    return _mean(held, [lse for _, lse in held]) if total else [math.nan]


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(a, b, strict=True))


def _said(parts: Sequence[State]) -> str:
    each = [f"({values}, {f'{lse:g}'})" for values, lse in parts]
    return f"[{', '.join(each)}]"
