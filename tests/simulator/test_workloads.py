"""Workloads: the times and lengths asked for, and nothing random that cannot be repeated."""

from __future__ import annotations

import numpy as np
import pytest

from mini_engine.errors import RequestError
from mini_engine.simulator.workloads import Request, at_speed, fixed_arrivals, poisson_arrivals, request_list


def test_an_explicit_list():
    assert request_list([(0, 2048, 8), (20, 8192, 2)]) == [Request("r0", 0.0, 2048, 8), Request("r1", 0.02, 8192, 2)]


def test_fixed_arrivals_go_through_their_lengths():
    requests = fixed_arrivals(4, 0.08, [128, 2048, 256], 96)
    assert [request.arrival for request in requests] == pytest.approx([0, 0.08, 0.16, 0.24])
    assert [request.num_prompt_tokens for request in requests] == [128, 2048, 256, 128]
    assert {request.num_output_tokens for request in requests} == {96}


def test_poisson_gaps_are_exponential():
    times = np.array([request.arrival for request in poisson_arrivals(20_000, 4.0, 100, 10, seed=7)])
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)  # fixed gaps would have none
    assert (gaps > 1 / 4).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_a_seed_repeats_itself_and_differs_from_others():
    assert poisson_arrivals(5, 1.0, 10, 10, seed=1) == poisson_arrivals(5, 1.0, 10, 10, seed=1)
    assert poisson_arrivals(5, 1.0, 10, 10, seed=1) != poisson_arrivals(5, 1.0, 10, 10, seed=2)


def test_speed_changes_times_only():
    faster = at_speed([Request("a", 3.0, 10, 5, (1,), 16, priority=2)], 1.5)
    assert faster == [Request("a", 2.0, 10, 5, (1,), 16, priority=2)]


def test_known_tokens_end_with_the_ids_or_the_prompt():
    assert Request("a", 0, 100, 1).num_known_tokens == 0
    assert Request("a", 0, 100, 1, (1,), 64).num_known_tokens == 64
    assert Request("a", 0, 100, 1, (1, 2), 64).num_known_tokens == 100


@pytest.mark.parametrize(
    "fields, says",
    [
        ((-1.0, 10, 5), "arrival"),
        ((float("nan"), 10, 5), "arrival"),
        ((float("inf"), 10, 5), "arrival"),
        ((0.0, 0, 5), "0 prompt"),
        ((0.0, 10, 0), "0 output"),
        ((0.0, 10, 5, (1,), 0), "block_size"),
    ],
)
def test_requests_that_cannot_be(fields, says):
    with pytest.raises(RequestError, match=says):
        Request("a", *fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: poisson_arrivals(3, 0.0, 1, 1),
        lambda: poisson_arrivals(3, float("nan"), 1, 1),
        lambda: fixed_arrivals(3, 0.1, [], 1),
        lambda: at_speed([], 0.0),
    ],
)
def test_arguments_that_cannot_be(make):
    with pytest.raises(RequestError):
        make()
