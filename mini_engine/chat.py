"""Chat templates: the model's own Jinja program that turns messages into the text it was trained on.

The template comes with the model, so it is somebody else's code: it runs in Jinja's immutable sandbox. The helpers it
may call (`raise_exception`, `strftime_now`, `tojson`, loop controls, the `generation` block) are those transformers
gives it. Source: https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_engine.errors import ModelLoadError, RequestError

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. tokens: the named special tokens it may mention, such as {"bos_token": "<s>"}.

    Raises ModelLoadError when the template does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template does not compile: {_one_line(error)}") from None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation. variables: anything else the template knows, e.g. `enable_thinking=False`.

        Raises RequestError for messages that are no messages or that the template refuses.
        """
        check_messages(messages)
        context = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **context
            )
        # A template is a program: besides its own refusals it can fail in any way an expression can.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the chat template refused the messages: {_one_line(error)}") from None


def check_messages(messages: Any) -> None:
    """Raises RequestError unless it is a non-empty list of {"role": text, "content": …}."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f'messages must be a non-empty list such as [{{"role": "user", "content": "Hello"}}], got {messages!r:.60}'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'message {index} must have a "role" (such as "user"), got {message!r:.60}')
        if "content" not in message and "tool_calls" not in message:
            raise RequestError(f'message {index} (role {message["role"]!r}) has no "content"')


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes characters for HTML, which the model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
