"""What a client may ask for in OpenAI's completions and chat APIs, with vLLM's additions.

A field is in one of three groups: those the engine follows; those that change nothing about the answer, which are let
pass; and those that would change it but are not implemented, which are let pass only with a value that asks for
nothing. Anything else is refused by name: a misspelt `max_token` must not give another answer than was asked for.

Types and ranges are for SamplingParams and the engine to judge. Source: OpenAI API reference; vLLM's request classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mini_engine.async_call import Conversation
from mini_engine.engine import Prompt
from mini_engine.errors import RequestError
from mini_engine.sequence import SamplingParams

Body = Mapping[str, Any]

SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens"),
    *("stop", "stop_token_ids", "ignore_eos"),
)
FOLLOWED = {
    *("model", "stream", "stream_options", "logprobs", "priority", "cache_salt", "return_token_ids"),
    *SAMPLING,
}
COMPLETION = {"prompt"}
CHAT = {"messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "chat_template_kwargs"}
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
    *("session_id", "parallel_tool_calls", "include_reasoning", "spaces_between_special_tokens"),
}
NOT_IMPLEMENTED: dict[str, tuple[Any, ...]] = {  # and the values besides null that ask for nothing
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
}


@dataclass(frozen=True)
class GenerationRequest:
    """A body that was understood.

    fill_context: no number of tokens was given, so the answer may fill the context. include_usage: a stream ends with
    the numbers of tokens. return_token_ids: put token ids beside the text.
    """

    prompts: list[Prompt | Conversation]
    params: SamplingParams
    fill_context: bool
    priority: int
    cache_salt: str | None
    stream: bool
    include_usage: bool
    return_token_ids: bool


def parse_completion(body: Body) -> GenerationRequest:
    """The body of POST /v1/completions. Raises RequestError."""
    _check_fields(body, COMPLETION, add_special_tokens=True)
    fill_context = "max_tokens" in body and body["max_tokens"] is None
    return _request(body, _prompts(body.get("prompt")), fill_context, body.get("max_tokens"), body.get("logprobs"))


def parse_chat(body: Body) -> GenerationRequest:
    """The body of POST /v1/chat/completions. Raises RequestError."""
    _check_fields(body, CHAT, add_special_tokens=False)
    max_tokens = body.get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.get("max_tokens")
    logprobs = body.get("top_logprobs")
    if _flag(body, "logprobs"):
        logprobs = logprobs or 0
    elif logprobs:
        raise RequestError(f"top_logprobs {logprobs!r} needs logprobs true beside it")
    else:
        logprobs = None
    return _request(body, [_conversation(body)], max_tokens is None, max_tokens, logprobs)


def _request(
    body: Body, prompts: list[Prompt | Conversation], fill_context: bool, max_tokens: Any, logprobs: Any
) -> GenerationRequest:
    _flag(body, "ignore_eos")
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None} | {"logprobs": logprobs}
    if fill_context:
        max_tokens = max(1, body["min_tokens"]) if isinstance(body.get("min_tokens"), int) else 1  # to be replaced
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise RequestError(f"cache_salt must be a non-empty text, got {salt!r}")
    return GenerationRequest(
        prompts,
        SamplingParams(**given),
        fill_context,
        0 if body.get("priority") is None else body["priority"],
        salt,
        _flag(body, "stream"),
        _include_usage(body),
        _flag(body, "return_token_ids"),
    )


def _check_fields(body: Body, own: set[str], add_special_tokens: bool) -> None:
    not_implemented = NOT_IMPLEMENTED | {"add_special_tokens": (add_special_tokens,)}
    for name, value in body.items():
        if name in FOLLOWED or name in own or name in WITHOUT_EFFECT:
            continue
        if name not in not_implemented:
            known = ", ".join(sorted(FOLLOWED | own))
            raise RequestError(f"unknown field {name!r}: known are {known}")
        if value is not None and value not in not_implemented[name]:
            raise RequestError(f"{name} {value!r:.60} is not implemented: leave it out, or another answer would result")


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def _include_usage(body: Body) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options must be an object such as {{'include_usage': true}}, got {options!r:.60}")
    for name in options.keys() - {"include_usage"}:
        if options[name]:
            raise RequestError(f"stream_options {name!r} is not implemented: include_usage is")
    return _flag(options, "include_usage")


def _prompts(prompt: Any) -> list[Prompt | Conversation]:
    """A text, a list of token ids, or a list of either."""
    if isinstance(prompt, str) or _are_ids(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"prompt must be a text, a list of token ids, or a list of either, got {prompt!r:.60}")
    for i, each in enumerate(prompt):
        if not isinstance(each, str) and not _are_ids(each):
            raise RequestError(f"prompt {i} must be a text or a list of token ids, got {each!r:.60}")
    return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in prompt]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _conversation(body: Body) -> Conversation:
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {variables!r:.60}")
    if reserved := variables.keys() & {"messages", "add_generation_prompt"}:
        raise RequestError(f"chat_template_kwargs may not name {sorted(reserved)[0]!r}: that is a field of its own")
    if body.get("add_generation_prompt") is not None:
        variables = {**variables, "add_generation_prompt": _flag(body, "add_generation_prompt")}
    messages = body.get("messages")
    if isinstance(messages, list):  # anything else is for the chat template to refuse
        messages = [_flat(message) for message in messages]
    return Conversation(messages or [], variables)


def _flat(message: Any) -> Any:
    """A message whose content is text: parts of text are joined by line breaks, as in vLLM."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for part in message["content"]:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"content of a message may hold parts of type 'text' only, got {part!r:.60}")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}
