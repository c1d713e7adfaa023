"""Decode context parallelism: copies and shards of KV, the sizes that fit, and the bytes of an exchange.

Tensor parallelism cuts KV by heads, down to one head a rank; with more ranks than KV heads, heads are copied. Context
parallelism cuts the copies by tokens instead, so KV of a rank shrinks on, to 1 / tp at most.

Source: vLLM's posts on decode context parallelism (2026); vLLM's `cp_lse_ag_out_rs` and a2a backend for the exchanges.
The posts say that partial outputs and LSE are all-gathered; the code gathers LSE only and reduce-scatters the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_engine.analysis.dcp_shapes import AttentionShape
from mini_engine.analysis.formats import BF16, NumberFormat
from mini_engine.analysis.inputs import AnalysisError, whole
from mini_engine.context_shard import ContextShard, allowed_context_parallel_sizes, check_context_parallel_size

LSE_BYTES = 4
EXCHANGES = ("ag_rs", "a2a")


def kv_copies(kv_heads: int, tp: int) -> float:
    """How many ranks hold each KV head under plain tensor parallelism: tp / KV heads, at least 1.

    4 KV heads on 8 ranks: 2 copies. MLA has one head for this purpose: 8.
    """
    whole(1, kv_heads=kv_heads, tp=tp)
    return max(1.0, tp / kv_heads)


def context_parallel_sizes(shape: AttentionShape, tp: int) -> tuple[int, ...]:
    """All sizes that can be run, ascending; () where the ranks do not divide the query heads."""
    return allowed_context_parallel_sizes(tp, shape.heads, shape.kv_heads)


@dataclass(frozen=True)
class SizeVerdict:
    """A size as three rules see it. mixed_groups: context groups whose ranks hold different KV heads, which is why."""

    ours: bool
    posts: bool
    vllm_0_33: bool
    mixed_groups: tuple[tuple[int, ...], ...]


def judge_size(heads: int, kv_heads: int, tp: int, size: int) -> SizeVerdict:
    """A context parallel size under our rule, the posts' (size divides tp // KV heads) and vLLM 0.33's check
    (tp above KV heads, size at most tp // KV heads, size divides tp).

    12 query heads, 2 KV heads, tp 6, size 2: vLLM starts, and ranks 2 and 3 answer with different KV heads.
    Raises AnalysisError where the ranks divide neither the heads nor into groups.
    """
    whole(1, heads=heads, kv_heads=kv_heads, tp=tp, size=size)
    if heads % tp or tp % size:
        raise AnalysisError(f"{tp} ranks must divide {heads} query heads and consist of whole groups of {size}")
    held = [{head * kv_heads // heads for head in range(r * heads // tp, (r + 1) * heads // tp)} for r in range(tp)]
    groups = [tuple(range(first, first + size)) for first in range(0, tp, size)]
    mixed = tuple(group for group in groups if any(held[rank] != held[group[0]] for rank in group))
    copies = tp // kv_heads
    return SizeVerdict(
        ours=size in allowed_context_parallel_sizes(tp, heads, kv_heads),
        posts=size == 1 or (copies >= size and copies % size == 0),
        vllm_0_33=size == 1 or (tp > kv_heads and size <= copies),
        mixed_groups=mixed,
    )


def kv_bytes_per_token_per_rank(shape: AttentionShape, tp: int, size: int = 1, kv: NumberFormat = BF16) -> float:
    """Bytes of KV that one token of context costs each rank, all layers, averaged over tokens. Raises ConfigError.

    size: context parallel size; 1 is plain tensor parallelism. A hybrid model's linear layers (KDA of Kimi K3) keep a
    state that does not grow with the context and is not cut by it: it is no part of this.
    """
    check_context_parallel_size(tp, size, shape.heads, shape.kv_heads)
    heads_held = shape.kv_heads if tp == 1 else max(1, -(-shape.kv_heads // tp))
    per_head = kv.bytes_for(shape.cached_values // shape.kv_heads)
    return shape.layers * heads_held * per_head / size


def contiguous_run(length: int, size: int) -> int:
    """Tokens of each rank in the posts' picture of contiguous runs, and of the first rank when dealt out in turn."""
    return ContextShard(0, size).local_length(length)


def exchange_collectives(comm_backend: str, q_replicate: bool = False) -> int:
    """Collectives of a layer: the queries' all-gather, then all-gather of LSE and reduce-scatter, or one all-to-all."""
    _check_exchange(comm_backend)
    return (not q_replicate) + (2 if comm_backend == "ag_rs" else 1)


def exchange_bytes(
    comm_backend: str,
    q_replicate: bool,
    size: int,
    batch: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    element_bytes: int = 2,
) -> int:
    """Bytes that each rank receives (and sends) in one layer. The length of the context is nowhere in it.

        queries        (N−1)/N · b · H · Dq · e
        ag_rs          (N−1) · b · H · 4  +  (N−1)/N · b · H · Dv · e
        a2a            (N−1)/N · b · H · (Dv · e + 4)

    size: N. batch: new tokens b. heads: H, query heads of the context group together (all of them where size is tp).
    Raises AnalysisError where the ranks do not divide the heads.
    """
    _check_exchange(comm_backend)
    whole(1, size=size, heads=heads, key_dim=key_dim, value_dim=value_dim, element_bytes=element_bytes)
    whole(0, batch=batch)
    if heads % size:
        raise AnalysisError(f"{heads} query heads cannot be dealt out evenly to {size} ranks")
    rows = (size - 1) * batch * heads // size
    queries = 0 if q_replicate else rows * key_dim * element_bytes
    lse = rows * LSE_BYTES * (size if comm_backend == "ag_rs" else 1)
    return queries + lse + rows * value_dim * element_bytes


def model_exchange_bytes(
    shape: AttentionShape,
    tp: int,
    size: int,
    batch: int,
    comm_backend: str = "a2a",
    q_replicate: bool = False,
    element_bytes: int = 2,
) -> int:
    """The same for a model, in all layers of one step. Raises ConfigError for sizes that cannot be run."""
    check_context_parallel_size(tp, size, shape.heads, shape.kv_heads)
    heads = shape.heads * size // tp
    layer = exchange_bytes(comm_backend, q_replicate, size, batch, heads, shape.key_dim, shape.value_dim, element_bytes)
    return shape.layers * layer


def replicated_query_bytes(shape: AttentionShape, tp: int, size: int, element_bytes: int = 2) -> int:
    """Weights that a rank holds, and reads every step, beyond its own share when the query projection is replicated.

    What it buys is one collective a layer. Raises ConfigError for sizes that cannot be run.
    """
    check_context_parallel_size(tp, size, shape.heads, shape.kv_heads)
    return shape.layers * shape.query_values * (size - 1) * element_bytes // tp


def up_projection_ratio(shape: AttentionShape) -> float:
    """Operations per cached token of projecting its latent up for every head, over those of the absorbed form.

    One post says that each rank projects its latents up; that is the form for prefill, where one projection serves many
    queries. For one query: up-projection and plain attention over attention in the latent. DeepSeek-V3: about 120.
    """
    if shape.latent is None:
        raise AnalysisError(f"{shape.name} has no latent to project up")
    ranks = shape.latent
    up = 2 * ranks.kv_lora_rank * (ranks.qk_nope + ranks.v_head)
    plain = 2 * (ranks.qk_nope + ranks.qk_rope + ranks.v_head)
    return (up + plain) / (2 * (shape.key_dim + shape.value_dim))


def _check_exchange(comm_backend: str) -> None:
    if comm_backend not in EXCHANGES:
        raise AnalysisError(f"dcp_comm_backend {comm_backend!r} is not one of {', '.join(EXCHANGES)}")
