"""What passes between an AsyncEngine's thread and the coroutines that wait for it: plain values, and a queue a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mini_engine.errors import EngineError
from mini_engine.output_processor import RequestOutput


class StepFailed(EngineError):
    """A step raised: what was in flight is lost, the next request may work."""


class EngineStopped(EngineError):
    """The thread has ended, or is about to."""


@dataclass(frozen=True)
class Conversation:
    """Messages for the model's chat template. variables: whatever else the template knows."""

    messages: Seq[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)


class TokenLogprob(NamedTuple):
    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Delta:
    """What one step added to output `index` of the `request`-th prompt of a call.

    finish_reason: comes with the last one. logprobs: a token each, if asked for: the drawn token, then the likeliest.
    """

    request: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[list[TokenLogprob]] | None


Event = Delta | EngineError | None  # None: all requests of the call have finished


@dataclass(frozen=True)
class EngineStats:
    """The engine between two steps. Prefix figures are in tokens; `finished` counts requests by their reason."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)


class Call:
    """The requests of one `submit`: an iterator over what the steps add to them, until all have finished.

    prompt_token_ids: one list a prompt. Raises StepFailed or EngineStopped where the engine could not go on.
    """

    def __init__(self, call_id: str, num_requests: int, abort: Callable[[Call], None]):
        self.call_id = call_id
        self.prompt_token_ids: list[list[int]] = []
        self.num_unfinished = num_requests
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._abort = abort
        self._ended = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        event = await self.events.get()
        if isinstance(event, Delta):
            return event
        self._ended = True
        if event is None:
            raise StopAsyncIteration
        raise event

    def close(self) -> None:
        """Abort what has not finished: its blocks come free before the next step. May be called at any time."""
        if not self._ended:
            self._ended = True
            self._abort(self)


@dataclass(eq=False)
class LiveRequest:
    """A request in the engine, and how much of each of its outputs the call has been told."""

    call: Call
    request: int
    record: RequestOutput
    sent: list[tuple[int, int]]

    def take(self, decode: Callable[[list[int]], str]) -> Iterator[Delta]:
        """What is new since the last time."""
        for i, output in enumerate(self.record.outputs):
            num_chars, num_tokens = self.sent[i]
            if len(output.token_ids) == num_tokens:
                continue
            self.sent[i] = len(output.text), len(output.token_ids)
            logprobs = None
            if output.logprobs is not None:
                logprobs = [
                    [TokenLogprob(t, decode([t]), report[t].logprob) for t in [token, *report]]
                    for token, report in zip(output.token_ids[num_tokens:], output.logprobs[num_tokens:], strict=True)
                ]
            yield Delta(
                self.request, i, output.text[num_chars:], output.token_ids[num_tokens:], output.finish_reason, logprobs
            )
