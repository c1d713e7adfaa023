"""Token ids to text while they are being generated: no half characters, no half stop strings.

Two questions, one class each. Which text is final? A character may be spread over several tokens. And which of it may
be shown? The end of it may turn out to be the beginning of a stop string, which is not part of the output.
Never imports torch.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from mini_engine.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Text of a growing list of tokens. All pieces together are `Tokenizer.decode` of the whole list."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteLevelStream:
    """Byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, and UTF-8 can be decoded as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Any other tokenizer: decode a short window again with each token, and show what the last one added.

    vLLM's two offsets: tokens before `_read` have been shown, and those from `_prefix` on are decoded along as
    context (a word's leading space depends on there being a word before). Tokens that may still be part of a character
    wait: runs of byte tokens such as <0xF0>, which become text or U+FFFD together, and text that ends in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        token = self._tokenizer.token_text(token_id)
        if token is None or _BYTE_TOKEN.fullmatch(token):
            return ""  # not even decoded: a long run of byte tokens must not be decoded again and again
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT) and _REPLACEMENT not in token:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._tokenizer.decode(self._window))

    def _advance(self, text: str) -> str:
        shown = len(self._tokenizer.decode(self._window[: self._read]))
        del self._window[: self._read]
        self._read = len(self._window)
        return text[shown:]


class Detokenizer:
    """Text of one output, and whether a stop string has ended it.

    stop: strings that end the output and are not part of it; of several the one completed first counts, and of those
        completed by the same character the longest.
    min_tokens: a stop string that is complete within the text of the first `min_tokens` tokens does not count.
    skip_special_tokens: leave out markers such as <|im_end|>.

    `num_tokens` counts the tokens used: those behind a stop string are not. `finished_by_stop` is that string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stream: TextStream = ByteLevelStream(tokenizer) if tokenizer.is_byte_level else WindowStream(tokenizer)
        self._stop = tuple(sorted(stop, key=len, reverse=True))
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._shown: list[str] = []
        self._num_shown = 0  # characters
        self._held = ""  # final, but may be the beginning of a stop string
        self._protected = 0  # characters of the first min_tokens tokens
        self.num_tokens = 0
        self.finished_by_stop: str | None = None

    @property
    def text(self) -> str:
        """All text shown so far; after `finish` or a stop string, the whole output."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that may be shown now. The cost of a token does not depend on how many came before."""
        pieces = []
        for token_id in token_ids:
            if self.finished_by_stop is not None:
                break
            self.num_tokens += 1
            skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
            new = "" if skipped else self._stream.push(token_id)
            if self.num_tokens <= self._min_tokens:
                self._protected += len(new)
            pieces.append(self._take(new))
        return "".join(pieces)

    def finish(self) -> str:
        """What had been held back, once no more tokens come. Bytes that never became a character are U+FFFD."""
        if self.finished_by_stop is not None:
            return ""
        new = self._stream.flush()
        if self.num_tokens <= self._min_tokens:
            self._protected += len(new)
        shown = self._take(new)
        if self.finished_by_stop is None:
            shown += self._show(self._held)
            self._held = ""
        return shown

    def _take(self, new: str) -> str:
        """Add final text; return what of it and of the text held back can be shown."""
        if not self._stop:
            return self._show(new)
        candidate = self._held + new
        if (found := self._find_stop(candidate)) is not None:
            start, self.finished_by_stop = found
            self._held = ""
            return self._show(candidate[:start])
        keep = self._possible_stop_length(candidate)
        self._held = candidate[len(candidate) - keep :]
        return self._show(candidate[: len(candidate) - keep])

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
            self._num_shown += len(text)
        return text

    def _find_stop(self, candidate: str) -> tuple[int, str] | None:
        """(start, stop string) of the stop that ends first, ends within protected text left out."""
        protected = self._protected - self._num_shown  # of the candidate's characters
        best: tuple[int, int, str] | None = None
        for stop in self._stop:  # longest first, so that of equal ends the longest stays
            start = candidate.find(stop, max(0, protected - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _possible_stop_length(self, candidate: str) -> int:
        """Length of the longest end of `candidate` that a stop string begins with."""
        longest = min(len(candidate), len(self._stop[0]) - 1)
        for length in range(longest, 0, -1):
            end = candidate[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0
