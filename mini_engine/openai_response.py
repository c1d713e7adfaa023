"""Answers in OpenAI's shapes: whole, or chunk by chunk. Fields beyond OpenAI's (token ids) are vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mini_engine.async_call import Call, Delta, TokenLogprob
from mini_engine.openai_request import GenerationRequest

LOWEST_LOGPROB = -9999.0  # JSON knows no infinity


@dataclass
class _Choice:
    """One output of one prompt, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: str | None = None
    text_offset: int = 0
    started: bool = False

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason


class CompletionAnswer:
    """The answer to POST /v1/completions. Choice `i * n + j` is output j of prompt i."""

    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, call: Call, model: str):
        self.request, self.call, self.model = request, call, model
        self.created = int(time.time())
        self.choices = [_Choice() for _ in range(len(request.prompts) * request.params.n)]

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """What of a delta is streamed: one chunk, or two where a choice begins."""
        index = delta.request * self.request.params.n + delta.index
        choice = self.choices[index]
        for content in self._stream_contents(choice, delta):
            if self.request.return_token_ids and not choice.started:
                content["prompt_token_ids"] = self.call.prompt_token_ids[delta.request]
            choice.started = True
            yield self._body(self.chunk_kind, [{"index": index, **content}])
        choice.add(delta)

    async def whole(self) -> dict[str, Any]:
        """Read the call to its end."""
        async for delta in self.call:
            self.choices[delta.request * self.request.params.n + delta.index].add(delta)
        choices = []
        for index, choice in enumerate(self.choices):
            entry = {"index": index, **self._content(choice), **self._tokens(choice.token_ids)}
            entry |= {"logprobs": self._logprobs(choice, choice.logprobs), "finish_reason": choice.finish_reason}
            if self.request.return_token_ids:
                entry["prompt_token_ids"] = self.call.prompt_token_ids[index // self.request.params.n]
            choices.append(entry)
        return {**self._body(self.kind, choices), "usage": self.usage()}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for it."""
        return {**self._body(self.chunk_kind, []), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens so far. A prompt counts once, however many outputs it has."""
        prompt = sum(len(tokens) for tokens in self.call.prompt_token_ids)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _tokens(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self.request.return_token_ids else {}

    def _stream_contents(self, choice: _Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs(choice, delta.logprobs or [])
        content = {"text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        yield {**content, **self._tokens(delta.token_ids)}

    def _content(self, choice: _Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def _logprobs(self, choice: _Choice, entries: list[list[TokenLogprob]]) -> dict[str, Any] | None:
        if self.request.params.logprobs is None:
            return None
        offsets = []
        for drawn, *_ in entries:
            offsets.append(choice.text_offset)
            choice.text_offset += len(drawn.text)
        return {
            "text_offset": offsets,
            "tokens": [drawn.text for drawn, *_ in entries],
            "token_logprobs": [_finite(drawn.logprob) for drawn, *_ in entries],
            "top_logprobs": [_by_text(top) for _, *top in entries],
        }


class ChatAnswer(CompletionAnswer):
    """The answer to POST /v1/chat/completions."""

    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _stream_contents(self, choice: _Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        if not choice.started:
            role = {"role": "assistant", "content": ""}
            yield {"delta": role, "logprobs": None, "finish_reason": None}
        logprobs = self._logprobs(choice, delta.logprobs or [])
        content = {"delta": {"content": delta.text}, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        yield {**content, **self._tokens(delta.token_ids)}

    def _content(self, choice: _Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text}}

    def _logprobs(self, choice: _Choice, entries: list[list[TokenLogprob]]) -> dict[str, Any] | None:
        count = self.request.params.logprobs
        if count is None:
            return None
        return {
            "content": [
                {**_token(drawn), "top_logprobs": [_token(entry) for entry in top[:count]]} for drawn, *top in entries
            ]
        }


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.text.encode())}


def _by_text(entries: list[TokenLogprob]) -> dict[str, float]:
    """Of tokens with the same text (pieces of characters have) the likeliest."""
    found: dict[str, float] = {}
    for entry in entries:
        found.setdefault(entry.text, _finite(entry.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
