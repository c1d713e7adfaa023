"""Fitting a cost model: known truths come back, and what cannot be known is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mini_engine.analysis import BOOK_STEP, Chunk, FittedStep
from mini_engine.errors import ConfigError
from mini_engine.simulator.fit import MeasuredStep, fit_run

STEPS = [(2048, 1), (8000, 1), (0, 128), (0, 2048), (0, 8192), (6144, 2048), (4096, 512)]


def measured(model: FittedStep, noise: float = 0.0, seed: int = 0) -> list[MeasuredStep]:
    factors = 1 + noise * np.random.default_rng(seed).standard_normal(len(STEPS))
    found = []
    for (start, tokens), factor in zip(STEPS, factors, strict=True):
        chunk = Chunk(tokens, start)
        found.append(MeasuredStep(tokens, chunk.pairs, model.seconds([chunk]) * float(factor)))
    return found


def coefficients(step: FittedStep) -> tuple[float, float, float]:
    return step.base_s, step.per_token_s, step.per_pair_s


@pytest.mark.parametrize("truth", [BOOK_STEP, FittedStep(5e-3, 10e-6, 0.0), FittedStep(0.0, 1e-3, 1e-8)])
def test_an_exact_run_gives_its_model_back(truth):
    fit = fit_run(measured(truth))
    assert coefficients(fit.step) == pytest.approx(coefficients(truth), rel=1e-6, abs=1e-13)
    assert fit.worst_error < 1e-9


def test_the_errors_are_those_of_the_rows():
    rows = measured(BOOK_STEP, noise=0.1)
    fit = fit_run(rows)
    base, token, pair = coefficients(fit.step)
    errors = [abs((base + token * row.num_tokens + pair * row.num_pairs) / row.seconds - 1) for row in rows]
    assert fit.worst_error == pytest.approx(max(errors))
    assert fit.median_error == pytest.approx(float(np.median(errors)))


def loss(values: tuple[float, ...], rows: list[MeasuredStep]) -> float:
    base, token, pair = values
    return sum(((base + token * row.num_tokens + pair * row.num_pairs) / row.seconds - 1) ** 2 for row in rows)


@pytest.mark.parametrize("seed", range(4))
def test_no_neighbour_is_better_and_none_is_negative(seed):
    rows = measured(FittedStep(1e-3, 30e-6, 1e-10), noise=0.3, seed=seed)  # so noisy that some would come out negative
    best = coefficients(fit_run(rows).step)
    assert min(best) >= 0
    scales = (1e-3, 30e-6, 1e-9)
    for moves in itertools.product((-1, 0, 1), repeat=3):
        near = tuple(max(0.0, b + 1e-4 * m * s) for b, m, s in zip(best, moves, scales, strict=True))
        assert loss(best, rows) <= loss(near, rows) + 1e-12


def test_a_coefficient_that_would_be_negative_is_zero():
    rows = [(1, 2048, 0.030), (1, 8192, 0.028), (2048, 2_098_176, 0.100), (4096, 8_390_656, 0.170)]
    assert fit_run(rows).step.per_pair_s == 0


@pytest.mark.parametrize(
    "rows, says",
    [
        ([], "0 measured steps"),
        ([(1, 100, 0.03)] * 5, "tell base, tokens and pairs apart"),
        ([(1, 100, 0.03), (8, 100, 0.03), (16, 100, 0.03)], "apart"),
        ([(1, 100, 0.0), (8, 300, 0.03), (16, 900, 0.03)], "above 0"),
        ([(1, 100, float("nan")), (8, 300, 0.03), (16, 900, 0.03)], "finite"),
    ],
)
def test_runs_that_tell_too_little_are_refused(rows, says):
    with pytest.raises(ConfigError, match=says):
        fit_run(rows)
