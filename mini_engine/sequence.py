"""One sequence of tokens on its way through the engine, and what was asked of it.

Two counters and no phases: `len(token_ids)` and `num_computed_tokens`. A sequence wants the tokens in between
computed; prefill, chunked prefill, a prefix hit and recompute after preemption are all that.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from mini_engine.errors import RequestError

_NO_TEXT: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the output tokens; vLLM's names, meanings and defaults.

    n: number of outputs, forked after one prefill.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: keeps the token that crosses it.
    seed: makes the draws of this request repeatable whatever runs beside it; None draws from the engine's seed.
    stop: strings that end the output and are not part of it. stop_token_ids: the same for tokens.
    min_tokens: neither end-of-text nor a stop ends the output before that many tokens.
    logprobs: report the log-probabilities of that many likeliest tokens beside the drawn one's.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Seq[str] | None = None
    stop_token_ids: Seq[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable | None):
                raise RequestError(f"{name} must be a list, got {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or _NO_TEXT)
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be one or several non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for token in self.stop_token_ids or ():
            _whole(token, "each of stop_token_ids", 0)
        _whole(self.n, "n", 1)
        _whole(self.max_tokens, "max_tokens", 1)
        _whole(self.min_tokens, "min_tokens", 0)
        _whole(self.top_k, "top_k", -1)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            _whole(self.logprobs, "logprobs", 0)
        if self.seed is not None:
            _whole(self.seed, "seed", 0)
        if not _number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise RequestError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must lie in (0, 1], got {self.top_p!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def finished(self) -> bool:
        return self not in (SequenceStatus.WAITING, SequenceStatus.RUNNING)


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, how many of them are computed, and the blocks that hold their KV.

    token_ids: prompt, then output; only ever appended to.
    block_table: block ids in order of position; the block of position p is `block_table[p // block_size]`.
    block_hashes: content hashes of the full blocks known so far (kept here so that each is computed once).
    num_forks: how many more sequences branch off when the prompt has been computed.
    num_pending_tokens: 1 while the step in flight draws a token whose position the next step may be given already.
    last_step: number of the last step that computes tokens of this sequence; until it has landed, the step may write.
    host_slots: where the KV of the computed tokens lies in host memory while the sequence is swapped out.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: int = 0
    cache_salt: str | None = None
    index: int = 0
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_forks: int = 0
    num_pending_tokens: int = 0
    last_step: int = 0
    max_tokens: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.num_forks = self.params.n - 1
        self.max_tokens = self.params.max_tokens
        self.stop_ids = frozenset(self.params.stop_token_ids or ())
        if not self.params.ignore_eos:
            self.stop_ids |= self.eos_token_ids

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, {self.num_computed_tokens} of "
            f"{len(self.token_ids)} tokens computed)"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens_to_finish(self) -> int:
        """Tokens whose KV the whole request needs: the last output token is never fed back (book 8.1.2)."""
        return self.num_prompt_tokens + self.max_tokens - 1

    def block_content(self, start: int, stop: int) -> tuple[int, ...]:
        """What tells the tokens `start` to `stop - 1` from others, for the prefix cache: the tokens themselves.

        The simulator's traces know no tokens, only ids of equal content, and override this.
        """
        return tuple(self.token_ids[start:stop])

    def fork(self, index: int) -> Sequence:
        """A sibling with the same tokens and counters and no blocks yet: `BlockManager.fork` shares those.

        A request's seed is offset by the sibling's index, so that siblings differ and each is repeatable.
        """
        seed = None if self.params.seed is None else self.params.seed + index
        child = Sequence(
            self.request_id,
            self.token_ids[: self.num_prompt_tokens],
            replace(self.params, n=1, seed=seed),
            self.eos_token_ids,
            self.priority,
            self.arrival,
            self.cache_salt,
            index,
        )
        child.token_ids = list(self.token_ids)
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.last_step = self.last_step
        child.block_hashes = list(self.block_hashes)
        return child


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _whole(value: object, name: str, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise RequestError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
