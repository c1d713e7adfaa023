"""When to cut the context: break-even against plain tensor parallelism, Helix layouts, and wide expert parallelism.

Everything here is a bound: reads at the card's bandwidth, bytes at the link's, and some hops for each collective. No
operations are counted, nothing overlaps. A collective of N ranks is taken to cost

    hop latency · ceil(log2 N)  +  bytes / bandwidth

the usual latency-and-bandwidth model (Hockney 1994; Thakur et al. 2005 for the trees). Latencies are no vendor's
figures: they are assumptions, stated in FABRICS, and decide most of what follows at small batches.

Source: vLLM's posts on decode context parallelism and on AgentX (2026); Bhatia et al., "Helix Parallelism" (2025).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mini_engine.analysis.dcp import exchange_bytes, exchange_collectives, kv_bytes_per_token_per_rank
from mini_engine.analysis.dcp_shapes import AttentionShape, ExpertShape
from mini_engine.analysis.formats import BF16, FP8, NumberFormat
from mini_engine.analysis.hardware import Hardware, Link, get_link
from mini_engine.analysis.inputs import AnalysisError, not_negative, whole

NVFP4 = NumberFormat("nvfp4", 16, 9, "NVIDIA NVFP4: 16 codes of 4 bits and one FP8 scale")


@dataclass(frozen=True)
class Fabric:
    """Ranks that reach each other by the same kind of link. hop_s: seconds of one hop, an assumption.

    domain: ranks it joins.
    """

    name: str
    link: Link
    hop_s: float
    domain: int

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """A collective of `ranks` ranks in which each receives `num_bytes`. Raises AnalysisError beyond the domain."""
        whole(1, ranks=ranks)
        if ranks > self.domain:
            raise AnalysisError(f"{self.name} joins {self.domain} ranks, not {ranks}")
        return self.hop_s * math.ceil(math.log2(ranks)) + self.link.seconds(num_bytes)


# Hops: about 20 µs for a small collective of 8 ranks through the host, 5 µs through NVLink with one-shot kernels.
FABRICS = {
    "pcie5": Fabric("pcie5", get_link("pcie5-x16"), 7e-6, 8),
    "nvlink": Fabric("nvlink", get_link("nvlink5"), 1.5e-6, 8),
    "nvl72": Fabric("nvl72", get_link("nvlink5"), 1.5e-6, 72),
}


def exchange_seconds(
    shape: AttentionShape,
    fabric: Fabric,
    tp: int,
    size: int,
    batch: int,
    comm_backend: str = "a2a",
    q_replicate: bool = False,
    element_bytes: int = 2,
) -> float:
    """Seconds that the exchange of one layer takes at least. Does not depend on the context."""
    if size == 1:
        return 0.0
    moved = exchange_bytes(
        comm_backend, q_replicate, size, batch, shape.heads * size // tp, shape.key_dim, shape.value_dim, element_bytes
    )
    hops = (exchange_collectives(comm_backend, q_replicate) - 1) * fabric.seconds(0, size)
    return hops + fabric.seconds(moved, size)


def break_even_context(
    shape: AttentionShape,
    hardware: Hardware,
    fabric: Fabric,
    tp: int,
    size: int,
    batch: int,
    comm_backend: str = "a2a",
    q_replicate: bool = False,
    kv: NumberFormat = BF16,
) -> int:
    """Tokens of context in each of `batch` requests from which a step with the context cut is faster than without.

    Cutting spares each rank (1 − 1/N) of the KV it would read, and costs the exchange. This is about the time of a step
    only: that N times as many requests fit is a gain at any length. Raises AnalysisError for size 1.
    """
    whole(1, batch=batch)
    if size == 1:
        raise AnalysisError("a context that is not cut breaks even nowhere: size must be above 1")
    spared = kv_bytes_per_token_per_rank(shape, tp, 1, kv) - kv_bytes_per_token_per_rank(shape, tp, size, kv)
    per_token = batch * spared / shape.layers / hardware.bandwidth
    return math.ceil(exchange_seconds(shape, fabric, tp, size, batch, comm_backend, q_replicate) / per_token)


@dataclass(frozen=True)
class HelixLayout:
    """The same ranks twice a layer: tp_attention · kvp of them for attention, tp_ffn · ep for the FFN."""

    tp_attention: int
    kvp: int
    tp_ffn: int
    ep: int


def helix_layouts(shape: AttentionShape, ranks: int) -> list[HelixLayout]:
    """Every way to use `ranks` ranks without a copy of KV: heads are cut tp_attention ways, the context kvp ways.

    tp_attention divides the KV heads, so it stays at 1 for MLA; the query heads divide among all ranks, since after
    the all-to-all each has its own; then the ranks regroup, experts over ep and each expert's width over tp_ffn.
    vLLM's tp/dcp is the row tp_attention = KV heads, kvp = dcp. Raises AnalysisError where the heads do not divide.
    """
    whole(1, ranks=ranks)
    if shape.heads % ranks:
        raise AnalysisError(f"{shape.heads} query heads cannot be dealt out evenly to {ranks} ranks")
    attention = [tp for tp in range(1, ranks + 1) if ranks % tp == 0 and shape.kv_heads % tp == 0]
    if shape.moe is None:
        ffn = [ranks]
    else:
        moe = shape.moe
        ffn = [
            t for t in range(1, ranks + 1) if ranks % t == 0 and moe.expert_ffn % t == moe.experts % (ranks // t) == 0
        ]
    return [HelixLayout(tp, ranks // tp, t, ranks // t) for tp in attention for t in ffn]


@dataclass(frozen=True)
class StepBound:
    """Seconds of one decode step on the slowest rank, by what takes them. requests: in the whole domain."""

    kv_s: float
    attention_weights_s: float
    expert_weights_s: float
    exchange_s: float
    requests: int
    ranks: int

    @property
    def seconds(self) -> float:
        return self.kv_s + self.attention_weights_s + self.expert_weights_s + self.exchange_s

    @property
    def tokens_per_second_per_rank(self) -> float:
        return self.requests / self.seconds / self.ranks


def dcp_step(
    shape: AttentionShape,
    hardware: Hardware,
    fabric: Fabric,
    ranks: int,
    contexts: Sequence[int],
    kv: NumberFormat = FP8,
    experts: NumberFormat = NVFP4,
) -> StepBound:
    """Tensor parallelism over all ranks with every context cut over all of them; one request a context.

    KV and attention weights are spread evenly whatever the lengths. The exchange carries all requests: queries in,
    results out, and the two all-reduces of hidden states that tensor parallelism needs.
    """
    moe = _experts(shape)
    batch = len(contexts)
    hidden = 2 * (ranks - 1) * batch * shape.hidden_size * 2 / ranks
    layer = exchange_seconds(shape, fabric, ranks, ranks, batch) + 2 * (
        fabric.seconds(hidden, ranks) + fabric.seconds(0, ranks)
    )
    return StepBound(
        sum(contexts) * kv_bytes_per_token_per_rank(shape, ranks, ranks, kv) / hardware.bandwidth,
        shape.layers * shape.attention_values * 2 / ranks / hardware.bandwidth,
        expert_read_bytes(shape, moe, batch, experts) / ranks / hardware.bandwidth,
        shape.layers * layer,
        batch,
        ranks,
    )


def dep_step(
    shape: AttentionShape,
    hardware: Hardware,
    fabric: Fabric,
    ranks: int,
    contexts: Sequence[int],
    kv: NumberFormat = FP8,
    experts: NumberFormat = NVFP4,
) -> StepBound:
    """Data-parallel attention and wide expert parallelism: each request whole on one rank, experts spread over all.

    The rank with the most context is waited for (requests go to the emptiest rank, longest first), and every rank reads
    all attention weights. Only the experts' inputs and outputs move: dispatch and combine of each rank's own tokens.
    """
    moe = _experts(shape)
    batch = len(contexts)
    moved = math.ceil(batch / ranks) * moe.experts_per_token * shape.hidden_size * 2 * (ranks - 1) / ranks
    return StepBound(
        fullest_rank(contexts, ranks) * shape.layers * kv.bytes_for(shape.cached_values) / hardware.bandwidth,
        shape.layers * shape.attention_values * 2 / hardware.bandwidth,
        expert_read_bytes(shape, moe, batch, experts) / ranks / hardware.bandwidth,
        (shape.layers - moe.dense_layers) * 2 * fabric.seconds(moved, ranks),
        batch,
        ranks,
    )


def dep_overtakes(
    shape: AttentionShape,
    hardware: Hardware,
    fabric: Fabric,
    domains: Sequence[int],
    contexts_of: Callable[[int], Sequence[int]],
) -> int | None:
    """The first of `domains` (ranks, ascending) where wide expert parallelism makes more tokens a second and rank.

    contexts_of: the contexts of all requests that a domain of that many ranks serves. None where DCP stays ahead.
    The AgentX post's claim for NVL72. What decides: the exchange of DCP carries every request and grows with the
    domain, that of expert parallelism a rank's own tokens; against it stand uneven contexts, and attention weights
    that every rank reads in full.
    """
    for ranks in domains:
        dcp, dep = (step(shape, hardware, fabric, ranks, contexts_of(ranks)) for step in (dcp_step, dep_step))
        if dep.tokens_per_second_per_rank > dcp.tokens_per_second_per_rank:
            return ranks
    return None


def fullest_rank(contexts: Sequence[int], ranks: int) -> int:
    """Tokens of context on the fullest rank when whole requests go to the emptiest one, longest first."""
    whole(1, ranks=ranks)
    loads = [0] * ranks
    for context in sorted(contexts, reverse=True):
        heapq.heapreplace(loads, loads[0] + context)
    return max(loads)


def expert_read_bytes(shape: AttentionShape, moe: ExpertShape, batch: int, experts: NumberFormat = NVFP4) -> float:
    """Bytes of expert weights that a step of `batch` tokens reads in all: the experts that at least one token chose.

    Choices are taken to be even and independent: E (1 − (1 − k/E)^b) of E experts. Shared experts are always read.
    """
    not_negative(batch=batch)
    chosen = moe.experts * (1 - (1 - moe.experts_per_token / moe.experts) ** batch)
    one = experts.bytes_for(3 * shape.hidden_size * moe.expert_ffn)
    return (shape.layers - moe.dense_layers) * (chosen + moe.shared_experts) * one


def _experts(shape: AttentionShape) -> ExpertShape:
    if shape.moe is None:
        raise AnalysisError(f"the table has no experts of {shape.name}")
    return shape.moe
