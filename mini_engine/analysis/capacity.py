"""How many requests fit a KV pool: tokens → blocks → requests (book 8.1.2, 8.3.1 and 8.3.2)."""

from __future__ import annotations

from mini_engine.analysis.formats import NumberFormat
from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.analysis.memory import kv_bytes_per_token
from mini_engine.config import ModelConfig


def tokens_computed(prompt: int, output: int) -> int:
    """Tokens whose KV a request leaves: the last output token is never fed back (book 8.1.2).

    `output=1` is the state right after prefill, which yields the first output token.
    """
    whole(1, prompt=prompt, output=output)
    return prompt + output - 1


def blocks_needed(tokens: int, block_size: int = 16) -> int:
    """Blocks that hold that many tokens; the last one may be part empty."""
    whole(0, tokens=tokens)
    whole(1, block_size=block_size)
    return -(-tokens // block_size)


def block_bytes(model: ModelConfig, block_size: int = 16, kv: NumberFormat | None = None) -> int:
    """Bytes of one block of KV in all layers."""
    whole(1, block_size=block_size)
    return block_size * kv_bytes_per_token(model, kv)


def pool_blocks(model: ModelConfig, pool_bytes: int, block_size: int = 16, kv: NumberFormat | None = None) -> int:
    """Whole blocks in that many bytes. An engine with a null block (vLLM, ours) has one fewer to give away."""
    whole(0, pool_bytes=pool_bytes)
    return pool_bytes // block_bytes(model, block_size, kv)


def shared_blocks(prompt: int, shared_prefix: int, block_size: int = 16) -> int:
    """Blocks of a common prefix that requests can refer to together: full ones only.

    A prompt's last token is computed in any case, since it yields the first output: its block is the request's own.
    """
    whole(1, prompt=prompt, block_size=block_size)
    whole(0, shared_prefix=shared_prefix)
    if shared_prefix > prompt:
        raise AnalysisError(f"a prompt of {prompt} tokens cannot share {shared_prefix} of them")
    return min(shared_prefix, prompt - 1) // block_size


def group_blocks(requests: int, prompt: int, output: int, block_size: int = 16, shared_prefix: int = 0) -> int:
    """Blocks that equal requests hold at the end of generation; shared ones count once, M_KV of book 8.1.2."""
    whole(0, requests=requests)
    shared = shared_blocks(prompt, shared_prefix, block_size)
    own = blocks_needed(tokens_computed(prompt, output), block_size) - shared
    return shared + requests * own if requests else 0


def group_kv_bytes(
    model: ModelConfig,
    requests: int,
    prompt: int,
    output: int,
    block_size: int = 16,
    shared_prefix: int = 0,
    kv: NumberFormat | None = None,
) -> int:
    """Bytes of `group_blocks`: KV allocated to equal requests at the end of generation."""
    return group_blocks(requests, prompt, output, block_size, shared_prefix) * block_bytes(model, block_size, kv)


def request_kv_bytes(
    model: ModelConfig, prompt: int, output: int, block_size: int = 16, kv: NumberFormat | None = None
) -> int:
    """Bytes of KV allocated to one request at the end of generation."""
    return group_kv_bytes(model, 1, prompt, output, block_size, kv=kv)


def max_requests(
    model: ModelConfig,
    pool_bytes: int,
    prompt: int,
    output: int,
    block_size: int = 16,
    shared_prefix: int = 0,
    kv: NumberFormat | None = None,
) -> int:
    """Equal requests that fit the pool together with all they will generate (admission by reservation, book 8.1.2).

    With `output=1` the count looks at prefill alone and promises too much: 42 short requests fit 12 GiB after
    prefill, and would need 13,608 MiB by the end. The common prefix is stored once, however many refer to it.
    """
    shared = shared_blocks(prompt, shared_prefix, block_size)
    own = blocks_needed(tokens_computed(prompt, output), block_size) - shared
    return max(0, pool_blocks(model, pool_bytes, block_size, kv) - shared) // own
