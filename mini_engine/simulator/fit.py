"""A cost model from a measured run: how long does this machine take?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from mini_engine.analysis import FittedStep
from mini_engine.errors import ConfigError


class MeasuredStep(NamedTuple):
    """One row of a measured run: the work of a step and the seconds it took."""

    num_tokens: int
    num_pairs: int
    seconds: float


class RunFit(NamedTuple):
    """A fitted step and how far off it is: |predicted / measured - 1|, the median and the worst of the rows."""

    step: FittedStep
    median_error: float
    worst_error: float


def fit_run(measured: Iterable[MeasuredStep | tuple[int, int, float]]) -> RunFit:
    """The step with the least sum of squared relative errors, and no negative part.

    Relative, unlike `analysis.fit_step`: a prefill takes a hundred times as long as a decode and would otherwise decide
    alone, and a simulated run is mostly decodes. Raises ConfigError where the rows cannot tell the three parts apart.
    """
    table = np.array([tuple(row) for row in measured], dtype=float).reshape(-1, 3)
    seconds = table[:, 2]
    if not np.isfinite(table).all() or not (seconds > 0).all():
        raise ConfigError("a measured step needs a finite time above 0 s")
    work = np.column_stack([np.ones(len(table)), table[:, :2]])
    scale = work.max(axis=0, initial=1)
    if np.linalg.matrix_rank(work / scale) < 3:
        raise ConfigError(
            f"{len(table)} measured steps do not tell base, tokens and pairs apart: measure decodes, prefills of two "
            f"lengths, and a chunk behind a long context"
        )
    design = work / scale / seconds[:, None]
    best, parts = np.inf, np.zeros(3)
    # Three unknowns: trying every set of parts that may be above zero is exact, and shorter than a solver.
    for kept in (list(kept) for size in (1, 2, 3) for kept in combinations(range(3), size)):
        found = np.linalg.lstsq(design[:, kept], np.ones(len(table)), rcond=None)[0]
        loss = float(((design[:, kept] @ found - 1) ** 2).sum())
        if (found >= 0).all() and loss < best:
            best, parts = loss, np.zeros(3)
            parts[kept] = found / scale[kept]
    errors = np.abs(work @ parts / seconds - 1)
    base, per_token, per_pair = (float(part) for part in parts)
    return RunFit(FittedStep(base, per_token, per_pair), float(np.median(errors)), float(errors.max()))
