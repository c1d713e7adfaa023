"""What the engine's own scheduler does, in one round or in a whole run, for checks that compare a student's with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mini_engine.analysis import BOOK_STEP, tokens_computed
from mini_engine.config import SchedulerConfig
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import SamplingParams
from mini_engine.sequence import Sequence as EngineSequence
from mini_engine.simulator import Request, simulate


def scheduled_round(decoding: Sequence[str], prompts: Mapping[str, int], budget: int, threshold: int) -> dict[str, int]:
    """{request: tokens} of the next round. decoding: requests with one token to compute; prompts: tokens left of each.

    There are rows and blocks enough, so that only budget (tokens a round) and threshold (tokens of a prompt) decide.
    Raises ValueError for a budget below the number of those who decode: they would never have got that far.
    """
    if budget < len(decoding):
        raise ValueError(f"{len(decoding)} requests cannot decode on a budget of {budget} tokens a round")
    config = SchedulerConfig(
        max_num_seqs=len(decoding) + len(prompts) or 1,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
        max_model_len=max(prompts.values(), default=0) + 16,
        num_blocks=1 + sum(tokens // 16 + 2 for tokens in [1] * len(decoding) + list(prompts.values())),
    )
    scheduler = Scheduler(config)
    for name in decoding:  # prompts of one token: each decodes as soon as that is computed
        scheduler.add(_sequence(name, 1))
    while scheduler.num_waiting or any(seq.num_output_tokens == 0 for seq in scheduler.running):
        step = scheduler.schedule()
        scheduler.update(step, [0] * len(step.sampled))
    for name, tokens in prompts.items():
        scheduler.add(_sequence(name, tokens))
    return {item.seq.request_id: item.num_tokens for item in scheduler.schedule().scheduled}


def _sequence(name: str, num_tokens: int) -> EngineSequence:
    return EngineSequence(name, [0] * num_tokens, SamplingParams(max_tokens=4, ignore_eos=True))


def admission_counts(workload: Sequence[Request], config: SchedulerConfig) -> dict[str, int]:
    """{"most_running", "preemptions", "recomputed"} of a run with the book's step times (exercise 8-0 f)."""
    run = simulate(workload, config, BOOK_STEP)
    once = sum(tokens_computed(request.num_prompt_tokens, request.num_output_tokens) for request in workload)
    return {
        "most_running": max(round_.num_running for round_ in run.rounds),
        "preemptions": run.stats.num_preemptions,
        "recomputed": run.stats.num_scheduled_tokens - once,
    }
