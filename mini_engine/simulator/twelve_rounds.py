"""The book's twelve rounds of one agent (8.3.4, exercise 8-4), as requests for the simulator.

Each prompt keeps all but the last 4 tokens of the one before and adds to them; between two rounds come unrelated
requests, which press on the pool. Lengths: public record of experiment 8-4 (bojieli/ai-infra-book, commit ec7bc086,
experiments/ch08/08-04/results): the first seven are in it, the others follow from its total and its hit counts.
"""

from __future__ import annotations

from itertools import count

from mini_engine.errors import RequestError
from mini_engine.simulator.workloads import Request

ROUND_PROMPTS = (210, 316, 670, 884, 1233, 1447, 1796, 2010, 2359, 2573, 2922, 3136)
REPLACED_TOKENS = 4
PRESSURE_PROMPT = 4000
OUTPUT = 8
# Long enough for a round to have ended before anything else arrives, at the book's prices of a step.
SECONDS_APART = 5.0


def common_prefixes() -> tuple[int, ...]:
    """Tokens that each round's prompt has in common with the one before; the first has none before it."""
    return (0, *(length - REPLACED_TOKENS for length in ROUND_PROMPTS[:-1]))


def twelve_rounds(pressure: int = 3, gap_s: float = 0.0) -> list[Request]:
    """The rounds "round0" to "round11", one after another, with `pressure` unrelated requests between two of them.

    gap_s: seconds that each round waits longer after the one before. Ids stand for single tokens.
    """
    if pressure < 0 or gap_s < 0:
        raise RequestError(f"pressure and gap_s must be at least 0, got {pressure} and {gap_s}")
    fresh = count()
    prompt: list[int] = []
    requests: list[Request] = []
    times = count()
    for number, (length, common) in enumerate(zip(ROUND_PROMPTS, common_prefixes(), strict=True)):
        waited = number * gap_s
        if number:
            for i in range(pressure):
                arrival = next(times) * SECONDS_APART + waited
                requests.append(Request(f"pressure{number}.{i}", arrival, PRESSURE_PROMPT, 1))
        prompt = [*prompt[:common], *(next(fresh) for _ in range(length - common))]
        arrival = next(times) * SECONDS_APART + waited
        requests.append(Request(f"round{number}", arrival, length, OUTPUT, tuple(prompt), 1))
    return requests
