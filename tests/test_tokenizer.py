"""Tokens and chat texts against transformers, and text → tokens → text against itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from mini_engine.errors import ModelLoadError, RequestError
from mini_engine.gguf_tokenizer import build_tokenizer, end_of_text_ids
from mini_engine.hf_tokenizer import load_tokenizer
from mini_engine.tokenizer import Tokenizer
from mini_engine.weights import open_checkpoint
from tests.builders import BOS, EOS, SPECIAL_TOKENS, save_tokenizer, tiny_tokenizer

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text())
E = tiny_tokenizer().token_to_id("E")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    with open_checkpoint("smollm2-135m") as checkpoint:
        return checkpoint.tokenizer()


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_smollm2_ids_are_those_of_transformers(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"]) == case["text"]


def test_the_cases_cover_the_digits_rule(smollm2: Tokenizer) -> None:
    assert any(case["digits_rule_matters"] for case in CASES)
    tokens = [smollm2.decode([index]) for index in smollm2.encode("x\n\n12")]
    assert tokens == ["x", "\n\n", "1", "2"]  # what the model was trained on


# All of Unicode but what SmolLM2 has no tokens for: its training text never held these.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"
ENCODABLE = st.characters(exclude_categories=["Cs"], exclude_characters=NO_TOKEN, max_codepoint=0x3FFFF)


@given(text=st.text(ENCODABLE, max_size=60))
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


@given(text=st.text(st.sampled_from(" \n\t\r1a's.é👩\u200d👧\x00ế\u0301"), max_size=30))
def test_smollm2_round_trip_of_white_space(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_has_no_token_for_some_control_characters(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode(f"a{NO_TOKEN}b")) == "ab"


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, {2})
    assert [index for index in range(49152) if smollm2.is_special(index)] == list(range(17))
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert smollm2.decode(ids, skip_special_tokens=True) == "hi"
    assert smollm2.decode([49152, 10**6]) == ""


def test_token_bytes_are_what_decode_joins(smollm2: Tokenizer) -> None:
    for index in range(0, smollm2.vocab_size, 7):
        assert smollm2.token_bytes(index).decode("utf-8", "replace") == smollm2.decode([index])
    assert smollm2.token_bytes(10**6) == b""


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    """The system message is the template's own; trim_blocks and lstrip_blocks as transformers sets them."""
    text = smollm2.apply_chat_template(HELLO)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.encode_chat(HELLO) == smollm2.encode(text, add_special_tokens=False)
    assert smollm2.encode_chat(HELLO).count(1) == 3
    own = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert smollm2.apply_chat_template(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


def test_surrogates_are_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        smollm2.encode("a\ud800b")


# Directories ---------------------------------------------------------------------------------------------------------


def transformers_tokenizer(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("add_bos", [False, True])
def test_directory(tmp_path: Path, add_bos: bool) -> None:
    backend = tiny_tokenizer(add_bos=add_bos)
    backend.enable_truncation(4)  # left over from training; must not cut prompts
    backend.enable_padding(length=9)
    save_tokenizer(tmp_path, backend)
    ours, theirs = load_tokenizer(tmp_path), transformers_tokenizer(tmp_path)
    for text in ("the quick brown fox, tiếng Việt 42", "", "<|im_start|>user\nhi<|im_end|>", "a  b\n\n1\t👩‍👧"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ids[:1] == [BOS] or not add_bos
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), BOS, {EOS})
    assert ours.apply_chat_template(HELLO) == theirs.apply_chat_template(
        HELLO, tokenize=False, add_generation_prompt=True
    )
    assert ours.encode_chat(HELLO) == theirs.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]


def test_tokens_only_tokenizer_config_knows(tmp_path: Path) -> None:
    added = {
        "320": {"content": "<think>", "special": False, "normalized": False},
        "321": {"content": "<|tool|>", "special": True, "normalized": False},
    }
    save_tokenizer(tmp_path, tiny_tokenizer(), added_tokens_decoder=added, additional_special_tokens=["the"])
    ours, theirs = load_tokenizer(tmp_path), transformers_tokenizer(tmp_path)
    ids = ours.encode("a<think>b<|tool|>cthe.")
    assert ids == theirs.encode("a<think>b<|tool|>cthe.") and {320, 321} < set(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True) == "a<think>bc."
    assert ours.vocab_size == 322 and ours.is_special(321) and not ours.is_special(320)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{% for m in messages %}\n    {% if loop.index0 is even %}\nA{{ m.content }}\n    {% endif %}\n{% endfor %}",
    "{%- for m in messages -%}{% generation %}{{ m.content }}{% endgeneration %}{%- endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}{{ thinking }}",
    "{{ messages | tojson(indent=2) }}{{ '<é>' | tojson }}{% if tools %}T{% endif %}{{ strftime_now('%Y')[:2] }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("as_file", [False, True])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str, as_file: bool) -> None:
    save_tokenizer(tmp_path, tiny_tokenizer(), chat_template="{{ 'unused' }}" if as_file else template)
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": " <one> "}, {"role": "user", "content": "hai"}]
    expected = transformers_tokenizer(tmp_path).apply_chat_template(messages, tokenize=False, thinking="no")
    actual = load_tokenizer(tmp_path).apply_chat_template(messages, add_generation_prompt=False, thinking="no")
    assert actual == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages[5]['content'] }}", "refused the messages: .*no element 5"),
        ("{{ messages[0].content + 1 }}", "refused the messages: can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__' .* is unsafe"),
        ("{% set x = messages.append(1) %}", "refused the messages: access to attribute 'append' .* is unsafe"),
    ],
)
def test_template_errors_are_one_line(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Tokenizer(tiny_tokenizer(), {}, template).apply_chat_template(HELLO)
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_compile_or_is_not_there() -> None:
    with pytest.raises(ModelLoadError, match="chat template does not compile: Encountered unknown tag"):
        Tokenizer(tiny_tokenizer(), {}, "{% nonsense %}").apply_chat_template(HELLO)
    with pytest.raises(RequestError, match="this model has no chat template"):
        Tokenizer(tiny_tokenizer()).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a non-empty list"),
        ({"role": "user"}, "messages must be a non-empty list"),
        ([{"content": "x"}], 'message 0 must have a "role"'),
        ([*HELLO, "x"], 'message 1 must have a "role"'),
        ([{"role": "user"}], r"message 0 \(role 'user'\) has no \"content\""),
    ],
)
def test_bad_messages(smollm2: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        smollm2.apply_chat_template(messages)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    save_tokenizer(tmp_path, tiny_tokenizer(), chat_template=named)
    assert load_tokenizer(tmp_path).apply_chat_template(HELLO) == "D"


# GGUF ----------------------------------------------------------------------------------------------------------------


def boundless_tokenizer() -> Backend:
    """Merges across words, numbers and line ends, and a token without merges: wherever a rule cuts, it shows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["\r\n\r\nwe'LL 12345 !the\n\n\n  67 it's (ok)\t\té, x\n1\n"], trainer)
    settings = json.loads(backend.to_str())
    settings["model"]["vocab"]["qzx"] = len(settings["model"]["vocab"])
    return Backend.from_str(json.dumps(settings))


def gguf_metadata(backend: Backend | None = None, **changes: Any) -> dict[str, Any]:
    """The metadata of `tiny_tokenizer` in a GGUF file; keys without their `tokenizer.ggml.`."""
    model = json.loads((backend or tiny_tokenizer()).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    entries = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


def reference(backend: Backend, pre: str) -> Backend:
    """The same tokens and merges with the other parts of the model family's own tokenizer.json."""
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    parts: dict[str, tuple[str, bool]] = {
        "llama-bpe": (r"\p{N}{1,3}", True),
        "qwen2": (r"\p{N}", False),
    }
    if pre in ("default", "gpt-2"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in parts:
        numbers, ignore_merges = parts[pre]
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        settings = json.loads(backend.to_str())
        settings["model"]["ignore_merges"] = ignore_merges
        settings["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
        split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        backend = Backend.from_str(json.dumps(settings))
    return backend


RULE_TEXTS = ("WE'LL 12345 !the\r\n\r\nthe\n\n\n  67 it's", "qzx e\u0301 \n1\n1", "x\n1 (ok)\t\té")


@pytest.mark.parametrize("pre", ["smollm", "default", "gpt-2", "llama-bpe", "qwen2"])
def test_pre_tokenizers(pre: str) -> None:
    backend = boundless_tokenizer()
    ours = build_tokenizer(gguf_metadata(backend, pre=pre, bos_token_id=None, eos_token_id=None, add_bos_token=False))
    expected = reference(backend, pre)
    for text in [*RULE_TEXTS, *(case["text"] for case in CASES)]:
        assert ours.encode(text) == expected.encode(text).ids, text


def test_pre_tokenizers_differ() -> None:
    """Or the test above could not tell one from the other."""
    rules = ("smollm", "default", "llama-bpe", "qwen2")
    encoders = [reference(boundless_tokenizer(), pre) for pre in rules]
    assert len({tuple(tuple(encoder.encode(text).ids) for text in RULE_TEXTS) for encoder in encoders}) == len(rules)


@pytest.mark.parametrize(
    "changes, ids",
    [
        ({"add_bos_token": False}, [E]),
        ({"add_bos_token": True}, [1, E]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, E, 2]),
        ({"add_bos_token": True, "add_eos_token": True, "bos_token_id": 2}, [2, E, 2]),
        ({}, [E]),
        ({"pre": "llama-bpe"}, [1, E]),  # llama.cpp adds it unless the file says no
        ({"pre": "llama-bpe", "add_bos_token": False}, [E]),
    ],
)
def test_begin_of_text(changes: dict[str, Any], ids: list[int]) -> None:
    tokenizer = build_tokenizer(gguf_metadata(**changes))
    assert tokenizer.encode("E") == ids
    assert tokenizer.encode("E", add_special_tokens=False) == [E]


def test_user_defined_tokens_are_whole_but_shown() -> None:
    metadata = gguf_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<tool call>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4]
    tokenizer = build_tokenizer(metadata)
    ids = tokenizer.encode("a<tool call>b")
    assert ids[1] == 320 and not tokenizer.is_special(320)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool call>b"
    assert tokenizer.token_bytes(320) == b"<tool call>"


@pytest.mark.parametrize(
    "changes, ids",
    [
        ({}, {0, 2}),  # <|endoftext|> and <|im_end|>, by name
        ({"token_type": None}, {2}),
        ({"token_type": None, "eot_token_id": 7, "eom_token_id": 9}, {2, 7, 9}),
        ({"token_type": None, "eos_token_id": None}, set()),
    ],
)
def test_end_of_text(changes: dict[str, Any], ids: set[int]) -> None:
    assert end_of_text_ids(gguf_metadata(**changes)) == ids


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported, only default, gpt-2, smollm"),
        ({"tokens": None}, "no tokenizer"),
        ({"tokens": 5}, "no tokenizer"),
        ({"token_type": [1]}, "320 tokens but not as many token types"),
        ({"merges": ["a zzz"]}, "merges do not fit its tokens"),
        ({"merges": ["nospace"]}, "merges do not fit its tokens"),
        ({"merges": [1]}, "merges do not fit its tokens"),
        ({"tokens": ["a"] * 320}, "lists 320 tokens, 319 of them twice"),
        ({"bos_token_id": 320}, "bos_token_id is 320, the tokenizer has 320 tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is set, but there is no"),
    ],
)
def test_bad_gguf_tokenizers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_tokenizer(gguf_metadata(**changes))
