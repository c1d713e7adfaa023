"""Requests that make an engine fork, hit prefixes and preempt, for tests of engines with several ranks."""

from __future__ import annotations

from typing import Any

from mini_engine import LLM, SamplingParams

# A pool in which the requests below do not fit all at once.
TIGHT: dict[str, Any] = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}


def ids(start: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [3 + (start * 31 + 7 * i * i) % 290 for i in range(length)]}


PREFIX = ids(1, 20)["prompt_token_ids"]
PROMPTS = [ids(2, 1), ids(3, 5), {"prompt_token_ids": PREFIX + [5, 6]}, ids(4, 33), {"prompt_token_ids": PREFIX + [9]}]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 14, "ignore_eos": True, **changes})


def tokens(llm: LLM) -> list[list[int]]:
    """What the requests give, each output by itself: greedy, but for one that forks and draws."""
    forks = params(n=2, temperature=1.0, seed=7)
    outputs = llm.generate(PROMPTS, [params(), params(), params(), forks, params()])
    again = llm.generate([PROMPTS[2]], params(max_tokens=3))  # its prefix has been seen
    return [list(each.token_ids) for output in [*outputs, *again] for each in output.outputs]
