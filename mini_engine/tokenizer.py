"""Text to token ids and back, and messages to text: a thin layer over the `tokenizers` library.

Decoding never "cleans up" spaces: what was encoded comes back, character for character. Never imports torch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_engine.errors import RequestError

if TYPE_CHECKING:
    import tokenizers

    from mini_engine.chat import ChatTemplate, Message


class Tokenizer:
    """backend: a `tokenizers.Tokenizer`, whose added tokens say which are special.

    named_tokens: text of the named special tokens, e.g. {"bos_token": "<s>"}, for the chat template and for
        `bos_token_id`. eos_token_ids: those the tokenizer itself declares; a checkpoint may know more.
    chat_template: Jinja source, None when the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()  # tokenizer.json may carry both from training; neither is wanted here
        backend.no_padding()
        self.backend = backend
        self._named = dict(named_tokens or {})
        self._template_source = chat_template
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = self._id("bos_token")
        eos = self._id("eos_token")
        self.eos_token_ids = frozenset() if eos is None else frozenset({eos})
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"

    def _id(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text are recognised; add_special_tokens adds what the model wants
        around a plain text (often a begin-of-text token). Bytes a vocabulary has no token for are left out, as
        transformers leaves them out: SmolLM2's lacks six control characters and the unassigned planes 4 to 11.
        Raises RequestError for text that is not Unicode text."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError(f"not text that can be encoded (a lone surrogate?): {text!r:.60}") from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of the ids. Bytes that are no valid UTF-8 become U+FFFD; ids beyond the vocabulary become nothing."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as the text this model was trained on, with its special tokens written out.

        add_generation_prompt: end with the header of the assistant's answer. variables: passed on to the template.
        Raises RequestError when there is no template or it refuses the messages.
        """
        return self._chat_template.render(messages, add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation. The template writes the special tokens itself, so none is added twice."""
        return self.encode(self.apply_chat_template(messages, **variables), add_special_tokens=False)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        from mini_engine.chat import ChatTemplate  # jinja2 takes a while and plain prompts do not need it

        if self._template_source is None:
            raise RequestError("this model has no chat template: prompt it with plain text instead")
        return ChatTemplate(self._template_source, self._named)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a marker that is not shown to a reader."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a byte-level token stands for; empty for an id beyond the vocabulary. See `is_byte_level`."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_of_char()
        if all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode()  # an added token with characters outside the alphabet stands for itself

    def token_text(self, token_id: int) -> str | None:
        """The token as it is written in the vocabulary, None for an id beyond it."""
        return self.backend.id_to_token(token_id)


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
