"""The tokenizer inside a GGUF file: byte-level BPE, rebuilt from its tokens and merges.

How text is cut into words before merging is not in the file: `tokenizer.ggml.pre` only names the rule, and the rules
below are those of the models' own tokenizer.json. Sources: llama.cpp's `llm_tokenizer_bpe` for the names and regular
expressions, the `tokenizers` library for the parts.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mini_engine.errors import ModelLoadError
from mini_engine.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS, _QWEN2_WORDS = _WORDS % "{1,3}", _WORDS % ""
PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")
# Ends of text or turn by name, for files that declare only one of several (llama.cpp looks for the same names).
_END_OF_TEXT = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Raises ModelLoadError, without the file's name, for a kind of tokenizer that is not supported."""
    model, tokens = metadata.get("tokenizer.ggml.model"), _tokens(metadata)
    if model != "gpt2":
        raise ModelLoadError(
            f"the tokenizer model {model!r} is not supported, only byte-level BPE ('gpt2'): use the model's safetensors"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelLoadError(f"the tokenizer lists {len(tokens)} tokens, {len(tokens) - len(vocab)} of them twice")
    try:
        # With ignore_merges a word that is a token is taken whole, even where the merges do not lead to it.
        merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception for a merge of unknown tokens
        raise ModelLoadError(f"the tokenizer's merges do not fit its tokens: {error}") from None
    _set_pre_tokenizer(backend, pre)
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, tokens, metadata)
    named = {
        f"{name}_token": tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := _token_id(metadata, f"{key}_token_id", len(tokens))) is not None
    }
    _set_post_processor(backend, named, metadata, add_bos_by_default=pre == "llama-bpe")
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, named, template if isinstance(template, str) else None)


def end_of_text_ids(metadata: dict[str, Any]) -> frozenset[int]:
    """The declared ids (end of text, of turn, of message) and every control token with such a name."""
    tokens, kinds = _tokens(metadata), metadata.get("tokenizer.ggml.token_type") or []
    declared = {_token_id(metadata, key, len(tokens)) for key in _END_KEYS}
    named = {index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in _END_OF_TEXT}
    return frozenset(named | {index for index in declared if index is not None})


def _tokens(metadata: dict[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError("the file has no tokenizer (tokenizer.ggml.tokens)")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != len(tokens)):
        raise ModelLoadError(f"the tokenizer has {len(tokens)} tokens but not as many token types")
    return tokens


def _token_id(metadata: dict[str, Any], key: str, vocab_size: int) -> int | None:
    index = metadata.get(f"tokenizer.ggml.{key}")
    if index is not None and (not isinstance(index, int) or not 0 <= index < vocab_size):
        raise ModelLoadError(f"tokenizer.ggml.{key} is {index!r}, the tokenizer has {vocab_size} tokens")
    return index


def _set_pre_tokenizer(backend: Backend, pre: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("default", "gpt-2", "smollm"))
    match pre:
        case "default" | "gpt-2":
            backend.pre_tokenizer = byte_level
        case "smollm":
            # Digits first: white space before a number is then a word of its own ("\n\n1" is "\n\n", "1").
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        case "llama-bpe" | "qwen2":
            words = Regex(_LLAMA3_WORDS if pre == "llama-bpe" else _QWEN2_WORDS)
            split = pre_tokenizers.Split(words, behavior="isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
            if pre == "qwen2":
                backend.normalizer = normalizers.NFC()
        case _:
            raise ModelLoadError(
                f"the pre-tokenizer {pre!r} is not supported, only {', '.join(PRE_TOKENIZERS)}: use the model's "
                f"safetensors"
            )


def _add_special_tokens(backend: Backend, tokens: list[str], metadata: dict[str, Any]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(tokens[index], special=kind == _CONTROL, normalized=False)
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _set_post_processor(
    backend: Backend, named: dict[str, str], metadata: dict[str, Any], add_bos_by_default: bool
) -> None:
    """Begin-of-text before and end-of-text behind a plain text, where the file says so."""
    bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos_by_default)
    eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [_needed(named, "bos_token")] if bos else []
    after = [_needed(named, "eos_token")] if eos else []
    if before or after:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)]
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _needed(named: dict[str, str], name: str) -> str:
    if name not in named:
        raise ModelLoadError(f"tokenizer.ggml.add_{name} is set, but there is no tokenizer.ggml.{name}_id")
    return named[name]
