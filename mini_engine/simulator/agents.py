"""Made-up agent sessions: long shared starts, contexts that grow by tool results, and now and then a rewrite.

Seeded, and drawn with `Random.random()` alone, whose sequence Python promises never to change.
"""

from __future__ import annotations

import math
from itertools import count
from random import Random

from mini_engine.errors import RequestError
from mini_engine.simulator.workloads import Request


def agent_requests(
    num_sessions: int,
    seed: int = 0,
    block_size: int = 64,
    num_templates: int = 4,
    mean_rounds: float = 12.0,
    sessions_per_minute: float = 6.0,
    rewrite_chance: float = 0.05,
) -> list[Request]:
    """The requests of `num_sessions` sessions, in order of arrival, named "session/round".

    Each session begins with the system prompt and tools of one of `num_templates` agents (the k-th with weight
    1/k) and its task; each round appends the last answer and a tool result. With `rewrite_chance` a round instead keeps
    the template and replaces what follows by a fifth of its length. Sessions start at random times, rounds follow after
    a model's and a tool's time. Only full blocks have ids, as in agent traces.
    """
    if num_sessions < 1 or num_templates < 1 or block_size < 1 or mean_rounds < 1 or not sessions_per_minute > 0:
        raise RequestError(
            f"agent sessions need at least one session, template, round and token a block, and more than 0 sessions a "
            f"minute; got {num_sessions}, {num_templates}, {mean_rounds}, {block_size} and {sessions_per_minute}"
        )
    random, fresh = Random(seed), count()
    templates = [[next(fresh) for _ in range(_between(random, 60, 200))] for _ in range(num_templates)]
    weights = [1 / (k + 1) for k in range(num_templates)]
    requests = []
    start = 0.0
    for session in range(num_sessions):
        start += _exponential(random, 60 / sessions_per_minute)
        template = templates[_weighted(random, weights)]
        ids, length, time = list(template), len(template) * block_size + _between(random, 50, 2000), start
        for round_ in range(max(1, round(_exponential(random, mean_rounds)))):
            if round_ and random.random() < rewrite_chance:
                length = len(template) * block_size + (length - len(template) * block_size) // 5
                ids = ids[: len(template)]
            ids += [next(fresh) for _ in range(length // block_size - len(ids))]
            output = _between(random, 40, 400)
            requests.append(Request(f"s{session}/{round_}", time, length, output, tuple(ids), block_size))
            length += output + min(8000, round(math.exp(5.5 + 1.3 * _normal(random))))
            time += 2.0 + _exponential(random, 10.0)
    return sorted(requests, key=lambda request: request.arrival)


def _between(random: Random, low: int, high: int) -> int:
    return low + int(random.random() * (high - low + 1))


def _exponential(random: Random, mean: float) -> float:
    return -mean * math.log(1 - random.random())


def _normal(random: Random) -> float:
    return math.sqrt(-2 * math.log(1 - random.random())) * math.cos(2 * math.pi * random.random())


def _weighted(random: Random, weights: list[float]) -> int:
    target = random.random() * sum(weights)
    for i, weight in enumerate(weights):
        target -= weight
        if target < 0:
            return i
    return len(weights) - 1
