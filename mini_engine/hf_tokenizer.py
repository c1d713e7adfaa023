"""The tokenizer of a Hugging Face directory: tokenizer.json, and what tokenizer_config.json adds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mini_engine.errors import ModelLoadError
from mini_engine.tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises ModelLoadError when tokenizer.json is missing or cannot be parsed."""
    from tokenizers import Tokenizer as Backend

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory}: no tokenizer.json (a tokenizer.model alone is not supported)")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything
        raise ModelLoadError(f"{path}: not a tokenizer: {error}") from None
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    named = {name: text for name in _NAMED if (text := _text(config.get(name))) is not None}
    _add_declared_tokens(backend, config, named)
    return Tokenizer(backend, named, _chat_template(directory, config))


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelLoadError for a file that is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def _text(token: Any) -> str | None:
    """A special token is written as text or as {"content": text, …}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _add_declared_tokens(backend: Any, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json declares as special (or at all), as transformers adds them."""
    from tokenizers import AddedToken

    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    for entry in declared.values() if isinstance(declared, dict) else ():
        if (text := _text(entry)) is not None and text not in known:
            flags = {name: bool(entry[name]) for name in _FLAGS if isinstance(entry, dict) and name in entry}
            backend.add_tokens([AddedToken(text, **flags)])
            known[text] = flags.get("special", False)
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    specials = [*named.values(), *(text for token in extra if (text := _text(token)) is not None)]
    unmarked = [text for text in specials if not known.get(text) and backend.token_to_id(text) is not None]
    backend.add_special_tokens(unmarked)


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json, where it may be a list of named ones."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
