"""Probabilities against brute force, draws against their distribution, and independence from everything else."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mini_engine.sampler import Logprob, probabilities, sample, top_logprobs, uniform
from mini_engine.sequence import SamplingParams, Sequence

VOCAB = 12


def request(prompt_length: int = 3, outputs: int = 0, arrival: int = 1, **params: Any) -> Sequence:
    seq = Sequence("r", list(range(prompt_length)), SamplingParams(**params), frozenset({0}), arrival=arrival)
    seq.token_ids += [5] * outputs
    return seq


def draw_many(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    """One token each of requests that differ in their seed only, all in one batch over one row."""
    return sample(logits[None], [0] * count, [request(seed=i, **params) for i in range(count)]).tokens


def brute_force(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if top_p < 1 and mass >= top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=VOCAB),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.013, 0.31, 0.517, 0.9041, 1.0]),
)
def test_probabilities(logits, temperature, top_k, top_p):
    expected = brute_force(logits, temperature, top_k, top_p)
    nudged = [brute_force(logits, temperature, top_k, top_p + d) for d in (-1e-9, 1e-9)]
    assume(top_p == 1.0 or nudged[0] == nudged[1] == expected)  # a sum that meets p to the last bit may go either way
    probs = probabilities(torch.tensor(logits), temperature, top_k, top_p)
    torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    assert [p > 0 for p in probs.tolist()] == [p > 0 for p in expected]


@pytest.mark.parametrize(
    "probs, top_k, top_p, kept",
    [
        pytest.param((0.5, 0.3, 0.2), 0, 0.6, {0, 1}, id="top-p-keeps-the-token-that-crosses"),
        pytest.param((0.5, 0.3, 0.2), 0, 0.45, {0}, id="top-p-keeps-one-at-least"),
        pytest.param((0.5, 0.3, 0.2), 0, 1e-9, {0}, id="tiny-top-p"),
        pytest.param((0.5, 0.25, 0.25), 0, 0.75, {0, 1}, id="p-met-exactly"),
        pytest.param((0.2, 0.2, 0.3, 0.3), 2, 1.0, {2, 3}, id="top-k"),
        pytest.param((0.25, 0.25, 0.25, 0.25), 3, 1.0, {0, 1, 2}, id="ties-in-order-of-ids"),
        pytest.param((0.4, 0.3, 0.2, 0.1), 2, 0.5, {0}, id="top-p-counts-what-top-k-left"),
        pytest.param((0.4, 0.3, 0.2, 0.1), 2, 0.6, {0, 1}, id="top-k-before-top-p"),
        pytest.param((0.5, 0.3, 0.2), 99, 1.0, {0, 1, 2}, id="top-k-beyond-the-vocabulary"),
        pytest.param((0.5, 0.3, 0.2), -1, 1.0, {0, 1, 2}, id="top-k-off"),
    ],
)
def test_what_is_kept(probs, top_k, top_p, kept):
    result = probabilities(torch.tensor(probs).log(), 1.0, top_k, top_p)
    assert {i for i, p in enumerate(result.tolist()) if p > 0} == kept
    mass = sum(probs[i] for i in kept)
    for i in kept:
        assert result[i] == pytest.approx(probs[i] / mass)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-300])
def test_no_temperature_is_greedy(temperature):
    result = probabilities(torch.tensor([0.0, 3.0, 3.0 - 1e-4, -5.0]), temperature)
    assert result.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_greedy_ties_take_the_lowest_id():
    logits = torch.zeros(3, 1000)
    logits[1, [997, 31, 500]] = 2.0
    logits[2, 999] = 1.0
    alone = sample(logits, [0, 1, 2], [request(temperature=0.0) for _ in range(3)])
    mixed = sample(logits, [0, 1, 2, 0], [request(temperature=0.0) for _ in range(3)] + [request()])
    assert alone.tokens == mixed.tokens[:3] == [0, 31, 999]


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 1.7, "top_k": 6, "top_p": 0.9}],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    """Chi-square over 4000 draws of fixed seeds, against the 99.9 % quantile (Wilson and Hilferty's formula)."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **params}
    expected = probabilities(logits, **settings)
    counts = Counter(draw_many(logits, 4000, **settings))
    support = [i for i in range(VOCAB) if expected[i] > 0]
    assert set(counts) <= set(support)
    chi2 = sum((counts[i] - 4000 * float(expected[i])) ** 2 / (4000 * float(expected[i])) for i in support)
    freedom = len(support) - 1
    assert chi2 < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniform_is_uniform(vary):
    numbers = [uniform(i, 0) if vary == "seed" else uniform(7, i) for i in range(20_000)]
    assert all(0 <= x < 1 for x in numbers) and len(set(numbers)) == len(numbers)
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.01)
    bins = Counter(int(x * 20) for x in numbers)
    assert sum((bins[i] - 1000) ** 2 / 1000 for i in range(20)) < 43.8  # 99.9 % of chi-square with 19
    pairs = Counter((int(x * 4), int(y * 4)) for x, y in zip(numbers, numbers[1:], strict=False))
    assert sum((pairs[i, j] - 1250) ** 2 / 1250 for i in range(4) for j in range(4)) < 37.7  # with 15


@given(seed=st.integers(0, 2**80), position=st.integers(0, 10**6))
def test_uniform_takes_any_seed(seed, position):
    assert 0 <= uniform(seed, position) < 1


def test_splitmix_of_its_authors():
    """The first output of the published SplitMix64 from state 0 is 0xE220A8397B1DCDAF; two rounds make one draw."""
    from mini_engine.sampler import _mix64

    assert _mix64(0) == 0xE220A8397B1DCDAF
    assert _mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("own", [{"seed": 11}, {}], ids=["own-seed", "engine-seed"])
def test_a_draw_is_independent_of_batch_mates_and_order(own):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    mates = [
        request(arrival=i, outputs=i % 3, temperature=t, seed=s, top_k=k)
        for i, (t, s, k) in enumerate([(1.0, None, 0), (0.0, None, 0), (0.7, 4, 9), (2.0, 4, 0), (1.0, 11, 3)])
    ]
    me = request(arrival=9, outputs=2, **own)
    alone = sample(logits[5:], [0], [me], seed=3).tokens[0]
    for place in range(6):
        batch = [*mates[:place], me, *mates[place:]]
        rows = [*range(place), 5, *range(place, 5)]
        assert sample(logits, rows, batch, seed=3).tokens[place] == alone


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 10_000)
    base = sample(logits, [0], [request(seed=1, arrival=1)]).tokens
    assert sample(logits, [0], [request(seed=1, arrival=8, prompt_length=9)], seed=77).tokens == base
    assert sample(logits, [0], [request(seed=2)]).tokens != base
    assert sample(logits, [0], [request(seed=1, outputs=1)]).tokens != base


def test_requests_without_a_seed_differ_and_repeat_with_the_engine():
    logits = torch.zeros(1, 100_000)
    batch = [request(arrival=i) for i in range(8)]
    first = sample(logits, [0] * 8, batch, seed=0).tokens
    assert len(set(first)) == 8
    assert sample(logits, [0] * 8, batch, seed=0).tokens == first
    assert set(sample(logits, [0] * 8, batch, seed=1).tokens).isdisjoint(first)


@pytest.mark.parametrize("seed", [None, 5])
def test_siblings_differ_and_repeat(seed):
    logits = torch.zeros(1, 100_000)

    def family() -> list[Sequence]:
        parent = request(seed=seed, n=4)
        return [parent, *(parent.fork(i) for i in (1, 2, 3))]

    tokens = sample(logits, [0] * 4, family()).tokens
    assert len(set(tokens)) == 4
    assert sample(logits, [0] * 4, family()).tokens == tokens
    if seed is not None:
        assert tokens[2] == sample(logits, [0], [request(seed=seed + 2)]).tokens[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("outputs, masked", [(0, True), (1, True), (2, False), (3, False)])
def test_min_tokens_keeps_stops_away(outputs, masked, temperature):
    """Stop token 0 (end of text) and 7 are by far the likeliest; 3 comes next. One row has no minimum."""
    logits = torch.full((VOCAB,), -1e4)
    logits[[0, 7, 3]] = torch.tensor([2e4, 1e4, 0.0])
    before = logits.clone()
    bound = request(outputs=outputs, min_tokens=2, stop_token_ids=[7], temperature=temperature)
    tokens = sample(logits[None], [0, 0], [bound, request(temperature=temperature)]).tokens
    assert tokens == [3 if masked else 0, 0]
    assert torch.equal(logits, before), "the caller's logits were changed"


def test_min_tokens_leaves_end_of_text_when_it_is_ignored():
    logits = torch.zeros(VOCAB)
    logits[0] = 1e4
    assert sample(logits[None], [0], [request(min_tokens=2, ignore_eos=True)]).tokens == [0]


@pytest.mark.parametrize("count", [0, 1, 3, VOCAB, VOCAB + 5])
def test_logprobs(count):
    """Of the model's own distribution, whatever temperature, top-k and min_tokens made of it."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    exact = torch.log_softmax(logits.double(), -1)
    logits[0, 0] = logits[0].max()
    exact = torch.log_softmax(logits.double(), -1)
    batch = [request(logprobs=count, temperature=2.0, min_tokens=2, seed=i) for i in range(6)]
    batch.append(request(temperature=2.0, seed=9))
    result = sample(logits, [0, 1, 1, 0, 1, 0, 1], batch)
    assert result.logprobs[-1] is None
    for row, token, report in zip([0, 1, 1, 0, 1, 0], result.tokens, result.logprobs, strict=False):
        assert report is not None and token in report
        order = sorted(exact[row].tolist(), reverse=True)
        assert len(report) in (min(count, VOCAB), min(count, VOCAB) + 1)
        for i, (logprob, rank) in report.items():
            assert logprob == pytest.approx(float(exact[row, i]), abs=1e-5)
            assert order[rank - 1] == pytest.approx(float(exact[row, i]), abs=1e-12)
        assert [entry.rank for entry in report.values()][: min(count, VOCAB)] == list(range(1, min(count, VOCAB) + 1))


def test_the_drawn_token_is_reported_behind_the_likeliest():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    report = top_logprobs(logits, token=0, count=2)
    assert list(report) == [3, 2, 0]
    total = math.log(sum(math.exp(x) for x in range(4)))
    assert report[0] == Logprob(pytest.approx(-total), 4)
    assert list(top_logprobs(logits, token=3, count=2)) == [3, 2]


def test_nothing_to_draw():
    assert sample(torch.zeros(0, VOCAB), [], []) == ([], [])
