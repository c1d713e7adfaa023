"""The figures of one request, by hand."""

from __future__ import annotations

import pytest

from mini_engine.metrics import RequestMetrics


def test_figures():
    metrics = RequestMetrics(arrival=10.0, scheduled=10.1, token_times=[10.5, 10.6, 10.9, 11.0])
    assert metrics.queue_time == pytest.approx(0.1)
    assert metrics.ttft == pytest.approx(0.5)
    assert metrics.itl == pytest.approx([0.1, 0.3, 0.1])
    assert metrics.tokens_per_second == pytest.approx(3 / 0.5)
    assert metrics.ttft + sum(metrics.itl) == pytest.approx(1.0), "T = TTFT + sum of ITL"
    assert metrics.summary() == "TTFT 500 ms, ITL 100.0 ms (median), 6.0 tok/s, 4 tokens"


def test_before_the_first_token():
    metrics = RequestMetrics(arrival=1.0)
    assert (metrics.queue_time, metrics.ttft, metrics.itl, metrics.tokens_per_second) == (None, None, [], None)
    assert metrics.summary() == "no token was produced"


def test_one_token_has_no_speed():
    metrics = RequestMetrics(arrival=1.0, scheduled=1.0, token_times=[1.25])
    assert (metrics.itl, metrics.tokens_per_second) == ([], None)
    assert metrics.summary() == "TTFT 250 ms, 1 tokens"


def test_a_clock_that_stands_still_divides_by_nothing():
    """Several tokens at one time, as a virtual clock or a coarse one gives them."""
    metrics = RequestMetrics(arrival=1.0, token_times=[2.0, 2.0, 2.0])
    assert metrics.tokens_per_second is None
    assert metrics.summary() == "TTFT 1000 ms, ITL 0.0 ms (median), 3 tokens"
