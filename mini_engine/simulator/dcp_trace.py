"""A synthetic agent trace with the lengths that vLLM's post on decode context parallelism states.

Stated: the share of prompts below 8K, 64K, 67K (the median), 128K, 256K and 1M tokens, and 400 output tokens on average
(analysis/data/dcp_post.toml). Ours: everything else, since the trace itself is not printed.

    between the stated points    lengths are spread evenly in their logarithm, from 1,000 tokens up
    sessions                     43 turns, and more than 96 % of the input seen before: AgentX's statistics; a turn
                                 repeats its session's context and extends it by `growth`
    order                        each line is the next turn of one of `open_sessions`, drawn at random
    outputs                      uniform from 200 to 600 tokens

With more lines in flight, more of them belong to one session and share its KV: `open_sessions` decides how KV use grows
with load. It is the one number chosen by looking at the post's table. See `dcp_serving.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import count
from random import Random
from typing import Any

from mini_engine.analysis.tables import read_table
from mini_engine.errors import RequestError
from mini_engine.simulator.workloads import Request

BLOCK_SIZE = 512
SHORTEST = 1000
OPEN_SESSIONS = 200
BINS = ((0, 32_000), (32_000, 64_000), (64_000, 128_000), (128_000, 200_000), (200_000, 2_000_000))


def stated_lengths() -> dict[str, Any]:
    """What the post says of its trace."""
    return read_table("dcp_post")["trace"]


def length_at(share: float) -> int:
    """The prompt length, in tokens, that `share` of all prompts are below. share in [0, 1]."""
    trace = stated_lengths()
    shares, lengths = [0.0, *trace["shares"]], [SHORTEST, *trace["lengths"]]
    for i in range(1, len(shares)):
        if share <= shares[i]:
            part = (share - shares[i - 1]) / (shares[i] - shares[i - 1])
            low, high = math.log(lengths[i - 1]), math.log(lengths[i])
            return round(math.exp(low + part * (high - low)))
    raise RequestError(f"a share lies in [0, 1], got {share}")


def stratified_lengths(num: int) -> list[int]:
    """`num` prompt lengths spread evenly over the distribution, ascending."""
    return [length_at((i + 0.5) / num) for i in range(num)]


def agent_trace(
    num_requests: int, open_sessions: int = OPEN_SESSIONS, turns: int = 43, growth: float = 0.01, seed: int = 0
) -> list[Request]:
    """Requests in the order of the trace, all arriving at 0: how many run is up to who replays it.

    The first `open_sessions` of them are a turn of each session, before the piece that is to be measured: what was
    seen before it began. num_requests: those after. turns: of each session. growth: of the context from turn to turn.
    Seeded, and drawn with `Random.random()` alone.
    """
    if min(num_requests, open_sessions, turns) < 1 or growth < 0:
        raise RequestError(
            f"a trace needs at least 1 request, session and turn and no negative growth, got {num_requests}, "
            f"{open_sessions}, {turns} and {growth}"
        )
    random, ids, numbers = Random(seed), count(), count()

    def session() -> _Session:
        number = next(numbers)
        share = (0.5 + number * _GOLDEN) % 1.0  # any stretch of sessions has the stated shares
        return _Session(number, length_at(share), turns, growth, ids)

    open_ = [session() for _ in range(open_sessions)]
    requests = []
    for i, each in enumerate(open_):
        each.turn = int(random.random() * turns)  # a piece cut out: sessions began before it
        requests.append(each.next_request(1))
        if each.turn == turns:
            open_[i] = session()
    for _ in range(num_requests):
        i = int(random.random() * open_sessions)
        requests.append(open_[i].next_request(200 + int(random.random() * 401)))
        if open_[i].turn == turns:
            open_[i] = session()
    return requests


_GOLDEN = (math.sqrt(5) - 1) / 2


class _Session:
    """middle: prompt length in the middle of its turns. turn: the next one."""

    def __init__(self, number: int, middle: int, turns: int, growth: float, fresh: Iterable[int]):
        self.number = number
        self.middle = middle
        self.turns = turns
        self.growth = growth
        self.turn = 0
        self._fresh = iter(fresh)
        self._ids: list[int] = []

    def next_request(self, output: int) -> Request:
        length = max(1, round(self.middle * (1 + self.growth) ** (self.turn - (self.turns - 1) / 2)))
        full = length // BLOCK_SIZE
        self._ids += [next(self._fresh) for _ in range(full - len(self._ids))]
        name = f"s{self.number}/{self.turn}"
        self.turn += 1
        return Request(name, 0.0, length, output, tuple(self._ids[:full]), BLOCK_SIZE)


def new_tokens(requests: Iterable[Request]) -> list[int]:
    """Prompt tokens of each request that no earlier line had: what a cache that forgets nothing would compute."""
    seen: set[int] = set()
    result = []
    for request in requests:
        known = 0
        while known < len(request.block_ids) and request.block_ids[known] in seen:
            known += 1
        result.append(request.num_prompt_tokens - known * request.block_size)
        seen.update(request.block_ids)
    return result
