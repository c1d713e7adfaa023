"""Streaming text against decoding everything at once, and stop strings against looking at every end of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mini_engine.detokenizer import ByteLevelStream, Detokenizer, WindowStream
from mini_engine.tokenizer import Tokenizer
from mini_engine.weights import open_checkpoint
from tests.builders import tiny_tokenizer

TINY = Tokenizer(tiny_tokenizer())
WORD = TINY.encode("the")[0]


def byte(value: int) -> int:
    """The tiny tokenizer's token of a single byte."""
    return next(index for index in range(3, 259) if TINY.token_bytes(index) == bytes([value]))


BYTES = [byte(value) for value in range(256)]
CONTINUATIONS = BYTES[0x80:0xC0]


def byte_fallback_tokenizer() -> Tokenizer:
    """What Llama 2 has: words with ▁ for the space before them, and a token <0xNN> for each byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    words += ["▁", "▁the", "the", "a", "▁a", "é", "ố", "\ufffd", "▁\ufffd", "x\ufffd", ".", "▁▁", "\n"]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


FALLBACK = byte_fallback_tokenizer()
FALLBACK_VOCAB = FALLBACK.backend.get_vocab()
FALLBACK_IDS = st.one_of(st.integers(0, FALLBACK.vocab_size), st.integers(259, FALLBACK.vocab_size - 1))


def stream(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int] = (), **options: Any
) -> tuple[str, Detokenizer]:
    """All text shown for ids that come in pieces, cut at `cuts`."""
    detokenizer = Detokenizer(tokenizer, **options)
    shown, start = "", 0
    for end in [*sorted(cuts), len(ids)]:
        shown += detokenizer.add(ids[start:end])
        start = max(start, end)
        assert detokenizer.text == shown
    shown += detokenizer.finish()
    assert detokenizer.text == shown and detokenizer.finish() == ""
    return shown, detokenizer


def test_the_stream_suits_the_tokenizer() -> None:
    assert TINY.is_byte_level and isinstance(Detokenizer(TINY)._stream, ByteLevelStream)
    assert not FALLBACK.is_byte_level and isinstance(Detokenizer(FALLBACK)._stream, WindowStream)


@given(ids=st.lists(st.integers(0, TINY.vocab_size + 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
@example(ids=[BYTES[0xF0], BYTES[0x9F], 1, BYTES[0x98], BYTES[0x80]], cuts=[2])  # a marker inside an emoji
@example(ids=[BYTES[0xE2], BYTES[0x82], BYTES[0x41], BYTES[0xE2]], cuts=[])
@example(ids=[BYTES[0xED], BYTES[0xA0], BYTES[0x80], BYTES[0xF5]], cuts=[1])  # a surrogate, a byte UTF-8 never has
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_text_is_decode_of_everything(skip: bool, ids: list[int], cuts: list[int]) -> None:
    shown, _ = stream(TINY, ids, cuts, skip_special_tokens=skip)
    assert shown == TINY.decode(ids, skip_special_tokens=skip)


@given(
    text=st.text(st.sampled_from("aé👩\u200d👧ố中\x00 \n"), max_size=20), cuts=st.lists(st.integers(0, 60), max_size=5)
)
def test_no_half_characters(text: str, cuts: list[int]) -> None:
    ids = [BYTES[value] for value in text.encode()]
    detokenizer = Detokenizer(TINY)
    for index in range(len(ids)):
        assert "\ufffd" not in detokenizer.add(ids[index : index + 1])
        assert detokenizer.text == text.encode()[: index + 1].decode("utf-8", "ignore")


@given(ids=st.lists(FALLBACK_IDS, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
@example(ids=[261, 3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0x80, 261, 260], cuts=[3])
@example(ids=[3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0x80, 261], cuts=[])  # valid at first, then not
@example(ids=[259, 269, 269, 271, 400, 269, 260], cuts=[])
@pytest.mark.parametrize("skip", [True, False])
def test_byte_fallback_text_is_decode_of_everything(skip: bool, ids: list[int], cuts: list[int]) -> None:
    shown, _ = stream(FALLBACK, ids, cuts, skip_special_tokens=skip)
    assert shown == FALLBACK.decode(ids, skip_special_tokens=skip)


def test_words_of_a_byte_fallback_tokenizer_are_shown_at_once() -> None:
    detokenizer = Detokenizer(FALLBACK)
    ids = [FALLBACK_VOCAB[word] for word in ("▁the", "▁a", "é", "<0xE2>", "<0x82>", "<0xAC>", "▁the")]
    assert [detokenizer.add([index]) for index in ids] == ["the", " a", "é", "", "", "", "€ the"]


def final_text(ids: Sequence[int]) -> str:
    """The part of the text no further token can change, by trying every continuation byte."""
    text = TINY.decode(ids, skip_special_tokens=True)
    complete = all(TINY.decode([*ids, more], skip_special_tokens=True) == text + "\ufffd" for more in CONTINUATIONS)
    return text if complete else text[:-1]


def first_stop(text: str, stops: Sequence[str], protected: int) -> tuple[str, str | None]:
    """(text before the stop string, the stop string): every end of the text is looked at."""
    for end in range(protected + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


# Few letters, so that stop strings occur, overlap and span tokens.
LETTERS = [BYTES[value] for value in b"aab"] + [WORD, 1, *(BYTES[value] for value in "é".encode()), BYTES[0xF0]]
STOPS = st.lists(st.text("abthe\u00e9\ufffd", min_size=1, max_size=4), max_size=3)


@given(
    ids=st.lists(st.sampled_from(LETTERS), max_size=25),
    stops=STOPS,
    min_tokens=st.integers(0, 12),
    cuts=st.lists(st.integers(0, 25), max_size=6),
)
@example(ids=[BYTES[97]] * 4, stops=["aa"], min_tokens=2, cuts=[])
@example(ids=[BYTES[97], BYTES[98], BYTES[97], BYTES[98]], stops=["bab", "ab"], min_tokens=2, cuts=[1])
@example(ids=[WORD], stops=["the", "h"], min_tokens=0, cuts=[])  # "h" is complete before "the" is
@example(ids=[BYTES[0xF0]], stops=["\ufffd"], min_tokens=0, cuts=[])
@example(ids=[BYTES[0xF0]], stops=["\ufffd"], min_tokens=1, cuts=[])
def test_stop_strings(ids: list[int], stops: list[str], min_tokens: int, cuts: list[int]) -> None:
    whole = TINY.decode(ids, skip_special_tokens=True)
    protected = len(final_text(ids[:min_tokens])) if len(ids) > min_tokens else len(whole)
    expected, stop = first_stop(whole, stops, protected)
    shown, detokenizer = stream(TINY, ids, cuts, stop=tuple(stops), min_tokens=min_tokens)
    assert (shown, detokenizer.finished_by_stop) == (expected, stop)


@given(ids=st.lists(st.sampled_from(LETTERS), max_size=20), stops=STOPS)
def test_everything_that_is_safe_is_shown_and_nothing_else(ids: list[int], stops: list[str]) -> None:
    """After each token: the final text, less the longest end of it that a stop string begins with."""
    detokenizer = Detokenizer(TINY, tuple(stops))
    for count in range(1, len(ids) + 1):
        detokenizer.add(ids[count - 1 : count])
        expected, stop = first_stop(final_text(ids[:count]), stops, 0)
        assert detokenizer.finished_by_stop == stop
        if stop is None:
            beginnings = [text[:length] for text in stops for length in range(len(text))]
            expected = expected[: len(expected) - max([len(b) for b in beginnings if expected.endswith(b)], default=0)]
        assert detokenizer.text == expected
        assert detokenizer.num_tokens == count
        if stop is not None:
            break


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    """Several tokens can come at once, as they do from speculative decoding."""
    ids = TINY.encode("xy.END.z", add_special_tokens=False)
    detokenizer = Detokenizer(TINY, ("END",))
    assert detokenizer.add(ids) == "xy."
    assert detokenizer.finished_by_stop == "END"
    assert TINY.decode(ids[: detokenizer.num_tokens]) == "xy.END"
    assert detokenizer.add(ids) == detokenizer.finish() == "" and detokenizer.text == "xy."


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Bytes that never become a character are the worst case; 2000 of them, and the windows stay as they were."""
    lengths: list[int] = []

    class Counting(Tokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
            lengths.append(len(list(token_ids)))
            return super().decode(token_ids, skip_special_tokens)

    cases = [(TINY, index) for index in (BYTES[0x80], WORD)]
    cases += [(FALLBACK, FALLBACK_VOCAB[word]) for word in ("<0x80>", "▁the", "\ufffd")]
    for tokenizer, index in cases:
        lengths.clear()
        detokenizer = Detokenizer(Counting(tokenizer.backend), ("never", "\ufffd!"))
        for _ in range(2000):
            detokenizer.add([index])
        assert sum(lengths) <= 4 * 2000, (tokenizer, index)


def test_smollm2() -> None:
    with open_checkpoint("smollm2-135m") as checkpoint:
        tokenizer = checkpoint.tokenizer()
    text = "Tiếng Việt 👩‍👩‍👧‍👦 and 中文, then\n\n\tcode: x = 1 STOP here"
    ids = [*tokenizer.encode(text), 2]
    assert stream(tokenizer, ids, range(len(ids)))[0] == text
    shown, detokenizer = stream(tokenizer, ids, range(len(ids)), stop=("STOP", "\n\n\n"))
    assert shown == text.partition("STOP")[0] and detokenizer.finished_by_stop == "STOP"
