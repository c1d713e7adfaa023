"""What, besides the tokens, must be equal before one request may use another's KV: the root of every hash chain.

    block 0 of a prefix:  hash(root, tokens 0..B-1)        root = (model, adapter, position rule, KV format, salt)
    block i:              hash(hash of block i-1, tokens)

K and V are numbers that one set of weights computed, rotated by one position rule, and stored in one format. Where any
of these differs, equal tokens have different KV, so they must never be found under one hash (book 8.3.3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import NamedTuple

from mini_engine.model_config import ModelConfig


class CacheKey(NamedTuple):
    """The root of a hash chain. It is kept whole beside the first block, so that a collision of two roots is noticed.

    model: name and revision of the weights. adapter: name and revision of a LoRA adapter, None for the base model.
    position_rule: how positions turn keys (`rope_rule`). kv_format: how K and V are stored.
    salt: what a caller adds to keep its prefixes to itself (`cache_salt`).
    """

    model: str = ""
    adapter: str | None = None
    position_rule: Hashable = None
    kv_format: str = ""
    salt: str | None = None


def hash_block(parent: int | CacheKey, tokens: tuple[int, ...]) -> int:
    """Hash of a full block in its context: the hash of the block before it, or for the first block the cache key."""
    return hash((parent, tokens))


def rope_rule(model: ModelConfig) -> Hashable:
    """All of a model's config that decides how a key is rotated at a position."""
    return (model.rope_theta, model.rope_scaling, model.rope_factors)


def file_revision(paths: Iterable[Path]) -> str:
    """A short name for the content of weight files that changes when one is replaced: their names, sizes and times.

    Reading gigabytes to hash them would cost more than loading them.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(set(paths))]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:12]
