"""Sampling parameters and what they refuse; a sequence's counters; forks."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError

import pytest

from mini_engine.errors import RequestError
from mini_engine.sequence import SamplingParams, Sequence, SequenceStatus
from tests.scheduling import sequence


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.max_tokens) == (1, 1.0, 0, 1.0, 16)
    assert (params.seed, params.min_tokens, params.logprobs, params.ignore_eos) == (None, 0, None, False)
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert not params.greedy and SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"n": 1.5}, "n must be a whole number of at least 1, got 1.5"),
        ({"n": True}, "n must be .*got True"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_tokens": None}, "max_tokens must be .*got None"),
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0, got -1"),
        ({"min_tokens": 20}, "min_tokens 20 is above max_tokens 16"),
        ({"top_k": -2}, "top_k must be a whole number of at least -1, got -2"),
        ({"top_k": 2.0}, "top_k must be .*got 2.0"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], got 0"),
        ({"top_p": 1.01}, r"top_p must lie in \(0, 1\], got 1.01"),
        ({"top_p": math.nan}, "top_p must .*got nan"),
        ({"top_p": "0.5"}, "top_p must .*got '0.5'"),
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0, got -0.1"),
        ({"temperature": math.inf}, "temperature must .*got inf"),
        ({"temperature": math.nan}, "temperature must .*got nan"),
        ({"temperature": "hot"}, "temperature must .*got 'hot'"),
        ({"temperature": None}, "temperature must .*got None"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"seed": 1.0}, "seed must .*got 1.0"),
        ({"logprobs": -1}, "logprobs must be a whole number of at least 0, got -1"),
        ({"logprobs": True}, "logprobs must .*got True"),
        ({"stop": ""}, "stop must be one or several non-empty strings, got ''"),
        ({"stop": ["a", ""]}, r"stop must .*got \['a', ''\]"),
        ({"stop": [3]}, r"stop must .*got \[3\]"),
        ({"stop": 3}, "stop must .*got 3"),
        ({"stop_token_ids": [-1]}, "each of stop_token_ids must be a whole number of at least 0, got -1"),
        ({"stop_token_ids": ["a"]}, "each of stop_token_ids must .*got 'a'"),
        ({"stop_token_ids": 3}, "stop_token_ids must .*got 3"),
    ],
    ids=str,
)
def test_refusals(fields, says):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert re.search(says, str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"temperature": 0},
        {"seed": 0},
        {"seed": 2**70},
        {"logprobs": 0},
        {"min_tokens": 16},
        {"stop": "x", "stop_token_ids": [0, 5]},
    ],
    ids=str,
)
def test_the_edges_are_allowed(fields):
    SamplingParams(**fields)


def test_stops_become_tuples_and_nothing_changes_later():
    tokens = [4, 5]
    params = SamplingParams(stop="END", stop_token_ids=tokens)
    tokens.append(6)
    assert (params.stop, params.stop_token_ids) == (("END",), (4, 5))
    with pytest.raises(FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


@pytest.mark.parametrize("prompt, output, tokens", [(10, 1, 10), (10, 5, 14), (1, 16, 16), (1536, 512, 2047)])
def test_tokens_to_finish(prompt, output, tokens):
    assert sequence("r", range(prompt), output).num_tokens_to_finish == tokens


@pytest.mark.parametrize(
    "fields, stops",
    [
        ({}, {9}),
        ({"ignore_eos": True}, set()),
        ({"stop_token_ids": [4]}, {4, 9}),
        ({"stop_token_ids": [4], "ignore_eos": True}, {4}),
    ],
)
def test_stop_ids(fields, stops):
    assert sequence("r", [1], eos_token_ids=frozenset({9}), **fields).stop_ids == stops


def test_outputs_follow_the_prompt():
    seq = sequence("r", [1, 2, 3])
    seq.token_ids += [7, 8]
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (5, 3, 2)
    assert seq.output_token_ids == [7, 8]


def test_which_status_is_an_end():
    assert {status.name for status in SequenceStatus if not status.finished} == {"WAITING", "RUNNING"}


def test_fork_shares_nothing_that_changes():
    params = SamplingParams(n=3, seed=5, max_tokens=7, stop_token_ids=[4])
    parent = Sequence("r", [1, 2, 3], params, frozenset({9}), priority=2, arrival=6, cache_salt="s")
    parent.num_computed_tokens, parent.num_cached_tokens, parent.block_hashes = 3, 1, [77]
    parent.block_table = [1, 2]
    child = parent.fork(2)
    assert (child.request_id, child.index, child.num_forks) == ("r", 2, 0)
    assert (child.params.n, child.params.seed, child.max_tokens) == (1, 7, 7)
    assert (child.priority, child.arrival, child.cache_salt, child.stop_ids) == (2, 6, "s", {4, 9})
    assert (child.num_computed_tokens, child.num_cached_tokens, child.block_hashes) == (3, 1, [77])
    assert child.block_table == [], "BlockManager.fork shares the blocks, with a reference each"
    child.token_ids.append(4)
    child.block_hashes.append(78)
    assert (parent.token_ids, parent.block_hashes) == ([1, 2, 3], [77])


def test_fork_after_some_output_keeps_the_prompt_length():
    parent = sequence("r", [1, 2, 3])
    parent.token_ids += [7]
    child = parent.fork(1)
    assert (child.num_prompt_tokens, child.output_token_ids, child.params.seed) == (3, [7], None)
