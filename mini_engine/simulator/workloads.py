"""What arrives, and when: requests given by their lengths and times, without any text.

    request_list([(0, 2048, 8), (20, 8192, 2)])   an explicit list, times in milliseconds
    fixed_arrivals(6, interval=0.080, ...)        one every 80 ms
    poisson_arrivals(100, rate=4.0, ...)          independent users: gaps are exponential, with mean 1 / rate

Traces of real services are read by `traces.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mini_engine.errors import RequestError


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    arrival: seconds on the virtual clock.
    block_ids: what the prompt holds, one id for every `block_size` tokens (equal ids in one context, equal tokens).
        They may cover only the start of the prompt; the rest, as the whole prompt without ids, is like no other's.

    Raises RequestError for lengths and times that cannot be.
    """

    request_id: str
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_size: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.arrival) or self.arrival < 0:
            raise RequestError(f"{self.request_id}: arrival must be a finite time of at least 0 s, got {self.arrival}")
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise RequestError(
                f"{self.request_id}: {self.num_prompt_tokens} prompt and {self.num_output_tokens} output tokens: a "
                f"request needs at least one of each"
            )
        if self.block_ids and self.block_size < 1:
            raise RequestError(f"{self.request_id}: block_ids need the number of tokens they stand for (block_size)")

    @property
    def num_known_tokens(self) -> int:
        """Prompt tokens whose content `block_ids` tell; the last block may be partly filled."""
        return min(len(self.block_ids) * self.block_size, self.num_prompt_tokens)


def request_list(table: Iterable[tuple[float, int, int]]) -> list[Request]:
    """Requests r0, r1, … from (arrival in ms, prompt tokens, output tokens)."""
    return [Request(f"r{i}", arrival_ms / 1e3, prompt, output) for i, (arrival_ms, prompt, output) in enumerate(table)]


def fixed_arrivals(
    count: int, interval: float, prompt: int | Sequence[int], output: int | Sequence[int]
) -> list[Request]:
    """`count` requests, one every `interval` seconds from 0 on. Lengths in tokens; lists are gone through in turn."""
    return _at([i * interval for i in range(count)], prompt, output)


def poisson_arrivals(
    count: int, rate: float, prompt: int | Sequence[int], output: int | Sequence[int], seed: int = 0
) -> list[Request]:
    """`count` requests of a Poisson process of `rate` requests a second, the first after one such gap. Lengths in
    tokens; lists are gone through in turn. The same seed gives the same times."""
    if not rate > 0:
        raise RequestError(f"rate must be above 0 requests a second, got {rate}")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return _at([float(time) for time in np.cumsum(gaps)], prompt, output)


def at_speed(requests: Iterable[Request], speed: float) -> list[Request]:
    """The same requests arriving `speed` times as fast: how a trace is replayed at another load."""
    if not speed > 0:
        raise RequestError(f"speed must be above 0, got {speed}")
    return [replace(request, arrival=request.arrival / speed) for request in requests]


def _at(times: Sequence[float], prompt: int | Sequence[int], output: int | Sequence[int]) -> list[Request]:
    prompts = [prompt] if isinstance(prompt, int) else list(prompt)
    outputs = [output] if isinstance(output, int) else list(output)
    if not prompts or not outputs:
        raise RequestError("the list of prompt or output lengths is empty")
    return [
        Request(f"r{i}", time, prompts[i % len(prompts)], outputs[i % len(outputs)]) for i, time in enumerate(times)
    ]
