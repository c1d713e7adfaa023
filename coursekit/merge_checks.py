"""Exercise 10-1: is this the merge of attention states, and if not, which other rule is it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from coursekit.checks import expect

State = tuple[list[float], float]
_HINT = "Each part weighs exp(lse). A part without tokens is left out; of a common offset of all lse nothing depends."


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
    filled: list[State] = [(values, lse) if lse > -math.inf else ([0.0] * len(values), 0.0) for values, lse in parts]
    zeros = [values for values, _ in filled]
    mistakes: dict[str, Sequence[float]] = {
        "an empty part taken for lse 0; it is minus infinity, and weighs nothing": merged(filled)[0],
        "lse read as a power of 2; it is a natural logarithm": merged(parts, 2.0)[0],
        "a base-2 lse read as natural": merged([(values, lse / math.log(2)) for values, lse in parts])[0],
        "the plain mean of all parts": _mean([(values, 0.0) for values in zeros], [1.0] * len(zeros)),
        "the sum of the parts": [math.fsum(column) for column in zip(*zeros, strict=True)],
    }
    if held:
        mistakes["the plain mean of the parts that hold something"] = _mean([(v, 0.0) for v in held], [1.0] * len(held))
        mistakes["weighed by lse itself, not by exp(lse)"] = _by_lse(parts)
        top = max(parts, key=lambda part: part[1])
        mistakes["only the part with the largest lse"] = top[0]
    if any(math.isnan(value) for values, _ in parts for value in values):
        label = "0 times NaN is NaN: what an empty part holds must not be read at all"
        mistakes = {label: [math.nan] * len(want[0]), **mistakes}
    differing = {label: values for label, values in mistakes.items() if not _near(values, want[0])}
    expect(f"{name}[0]", lambda: _state(came())[0], want[0], rel_tol=1e-6, mistakes=differing, hint=_HINT)
    whole = {
        "the lse of the largest part": max(lse for _, lse in parts),
        "the sum of the lse": sum(lse for _, lse in parts),
        "the sum of weights, without the logarithm": math.exp(min(want[1], 700.0)),
        "the logarithm without the offset that was taken out": want[1] - max(lse for _, lse in parts),
        "the logarithm to base 2": want[1] / math.log(2),
    }
    whole = {label: value for label, value in whole.items() if value != want[1]}
    hint = "The lse of the whole is log(exp(lse) + exp(lse) + …) over the parts."
    expect(f"{name}[1]", lambda: _state(came())[1], want[1], rel_tol=1e-6, mistakes=whole, hint=hint)


def _state(value: Any) -> tuple[list[Any], Any]:
    values, lse = value
    return list(values), lse


def _mean(parts: Sequence[State], weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    columns = range(len(parts[0][0]))
    return [sum(w * values[i] for w, (values, _) in zip(weights, parts, strict=True)) / total for i in columns]


def _by_lse(parts: Sequence[State]) -> list[float]:
    held = [(values, lse) for values, lse in parts if lse > -math.inf]
    total = sum(lse for _, lse in held)
    return _mean(held, [lse for _, lse in held]) if total else [math.nan]


def _near(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(a, b, strict=True))


def _said(parts: Sequence[State]) -> str:
    each = [f"({values}, {f'{lse:g}'})" for values, lse in parts]
    return f"[{', '.join(each)}]"
