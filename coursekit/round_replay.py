"""The book's twelve rounds played against a prefix cache, with a model or without (lab 8-4).

    rounds = replay_rounds(prompts, config, engine, pressure=3)     one `RoundSeen` a round

Hits are the scheduler's own, the same with and without an engine. A request that is "not computed" takes its blocks
from the same scheduler, only the model is not asked: its tokens are made up, and its blocks hold nothing. No more is
needed of the pressure requests, whose 132,000 tokens would keep a CPU busy for many minutes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from tqdm.auto import tqdm

from mini_engine.config import SchedulerConfig
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import SamplingParams
from mini_engine.sequence import Sequence as EngineSequence
from mini_engine.simulator.twelve_rounds import OUTPUT, PRESSURE_PROMPT, REPLACED_TOKENS, ROUND_PROMPTS

if TYPE_CHECKING:
    from mini_engine import LLMEngine


class RoundSeen(NamedTuple):
    """One round. cached: tokens found. computed: tokens of the prompt that were not.

    ttft_s, outputs: None where the model was not asked.
    """

    prompt: int
    cached: int
    computed: int
    ttft_s: float | None
    outputs: tuple[int, ...] | None


def round_prompts(stream: Sequence[int]) -> list[list[int]]:
    """Prompts of the book's lengths, each with all but the last 4 tokens of the one before and more of `stream`.

    Where the stream happens to go on as a replaced token did, it is skipped to one that differs: no more is in common.
    Raises ValueError for a stream that is too short.
    """
    prompts: list[list[int]] = []
    used = 0
    for length in ROUND_PROMPTS:
        before = prompts[-1] if prompts else []
        kept = before[:-REPLACED_TOKENS]
        while before and used < len(stream) and stream[used] == before[len(kept)]:
            used += 1
        new = list(stream[used : used + length - len(kept)])
        used += len(new)
        if len(kept) + len(new) < length:
            raise ValueError(f"a stream of {len(stream):,} tokens is too short: the rounds need {used:,} and more")
        prompts.append(kept + new)
    return prompts


def in_common(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that each prompt begins with in common with the one before; the first has none before it."""
    pairs = zip(prompts, prompts[1:], strict=False)
    return [0, *(sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) for pair in pairs)]


def replay_rounds(
    prompts: Sequence[Sequence[int]],
    config: SchedulerConfig,
    engine: LLMEngine | None = None,
    pressure: int = 3,
    computed: Collection[int] | None = None,
    compute_pressure: bool = False,
    gap_s: float = 0.0,
    desc: str = "rounds",
) -> list[RoundSeen]:
    """Serve the rounds one after another, with `pressure` unrelated requests of 4,000 tokens between two of them.

    config: how to schedule; an engine's pool must have at least as many blocks, of the same size.
    computed: the rounds for which the model is asked; None: all. A round that builds on one left out would read blocks
        that hold nothing, so leave rounds out only where nothing is found. gap_s: seconds to wait before each round.
    Raises ValueError for an engine whose pool is too small or that is busy, and for a round that found what was not
    computed.
    """
    scheduler = Scheduler(config)
    if engine is not None:
        _use(engine, scheduler)
    wanted = set(range(len(prompts)) if computed is None else computed)
    seen: list[RoundSeen] = []
    unrelated = 0
    left_out = False
    for i, prompt in enumerate(tqdm(prompts, desc=desc)):
        for _ in range(pressure if i else 0):
            unrelated += 1
            tokens = _unrelated(unrelated, 49_000 if engine is None else engine.model_config.vocab_size)
            _serve(scheduler, engine if compute_pressure else None, tokens, 1, f"pressure{unrelated}")
        time.sleep(gap_s if i else 0)
        asked = engine if i in wanted else None
        round_ = _serve(scheduler, asked, prompt, OUTPUT, f"round{i}")
        if asked is not None and left_out and round_.cached:
            raise ValueError(f"round {i} found {round_.cached} tokens, though a round before it was not computed")
        left_out |= asked is None
        seen.append(round_)
    return seen


def _serve(scheduler: Scheduler, engine: LLMEngine | None, prompt: Sequence[int], output: int, name: str) -> RoundSeen:
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    if engine is None:
        seq = EngineSequence(name, list(prompt), params)
        scheduler.add(seq)
        while scheduler.has_unfinished():
            step = scheduler.schedule()
            scheduler.update(step, [-1] * len(step.sampled))
        return RoundSeen(len(prompt), seq.num_cached_tokens, len(prompt) - seq.num_cached_tokens, None, None)
    record = engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        engine.step()
    cached = record.metrics.num_cached_tokens
    tokens = tuple(record.outputs[0].token_ids)
    return RoundSeen(len(prompt), cached, len(prompt) - cached, record.metrics.ttft, tokens)


def _unrelated(number: int, vocabulary: int) -> list[int]:
    """A prompt whose first block is like no other's: `number` is its first token, so no hash chain meets another."""
    return [number, *((7919 * number + 31 * j) % vocabulary for j in range(1, PRESSURE_PROMPT))]


def _use(engine: LLMEngine, scheduler: Scheduler) -> None:
    config, runner = scheduler.config, engine.runner
    if config.block_size != runner.block_size or config.num_blocks > runner.num_blocks:
        raise ValueError(
            f"config has {config.num_blocks} blocks of {config.block_size}, the engine {runner.num_blocks} of "
            f"{runner.block_size}"
        )
    if engine.has_unfinished_requests():
        raise ValueError(f"the engine still serves {len(engine.requests)} requests: step it to their end first")
    engine.scheduler = scheduler
