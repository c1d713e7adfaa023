"""What a step takes on ranks that hold KV whole or cut: arithmetic for MLA models with experts, such as Kimi K2.

    step = max(matrix work, weight reads) + decode attention: max(reads, operations) + prefill attention
           + all-reduces + exchange of DCP + a constant

Nothing overlaps but what stands in one max. Between TP and TP + DCP two things differ: what a token of context costs
each rank to hold and read, all of its latents or an eighth, and the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.analysis.dcp import kv_bytes_per_token_per_rank
from mini_engine.analysis.dcp_layouts import FABRICS, NVFP4, Fabric, exchange_seconds, expert_read_bytes
from mini_engine.analysis.dcp_shapes import AttentionShape, ExpertShape, LatentShape, get_attention
from mini_engine.analysis.flops import causal_pairs
from mini_engine.analysis.formats import FP8, NumberFormat
from mini_engine.analysis.hardware import Hardware, get_hardware
from mini_engine.analysis.units import GiB
from mini_engine.context_shard import check_context_parallel_size
from mini_engine.errors import ConfigError
from mini_engine.scheduler import SchedulerOutput
from mini_engine.sequence import Sequence

KIMI_K2 = get_attention("kimi-k2")
B200 = get_hardware("b200")


class StepLoad(NamedTuple):
    """Of one step: decodes and their context, prefill tokens, their causal pairs and the context before them.

    known: prompt tokens of each sequence that a tier below the pool has, which are fetched and not computed.
    """

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_pairs: int
    prefill_context: int

    @classmethod
    def of(cls, output: SchedulerOutput, known: Mapping[Sequence, int]) -> StepLoad:
        decodes = decode_context = tokens = pairs = context = 0
        for seq, start, num_tokens in output.scheduled:
            end = start + num_tokens
            start = max(start, known[seq])
            if num_tokens == 1:
                decodes += 1
                decode_context += end
            elif start < end:
                tokens += end - start
                pairs += causal_pairs(end - start, start)
                context += start
        return cls(decodes, decode_context, tokens, pairs, context)


@dataclass(frozen=True)
class Cluster:
    """Ranks under tensor parallelism, with the context cut `dcp` ways. All but the first four fields are assumptions;
    so is it that Kimi K2.6 has the shape of K2.

    kv, experts: formats; everything else is BF16. utilization: share of the card's memory in use; reserve_bytes: of
    that, for activations and graphs. mfu: of the dense peak in FP4 (experts), BF16 (projections, prefill attention) and
    FP8 (decode attention). mbu: of the memory bandwidth. overhead_s: a step's time besides. lower_tier: every prefix
    of the trace that was seen before is fetched, in no time, wherever it is. tokens_per_step: budget without that tier;
    with it there is none, since what is fetched counts in the scheduler's budget as well.
    Raises ConfigError for a model that is not MLA with experts, and for sizes that cannot be run.
    """

    dcp: int = 1
    ranks: int = 8
    shape: AttentionShape = KIMI_K2
    hardware: Hardware = B200
    fabric: Fabric = FABRICS["nvlink"]
    kv: NumberFormat = FP8
    experts: NumberFormat = NVFP4
    utilization: float = 0.9
    reserve_bytes: int = 12 * GiB
    mfu: float = 0.5
    mbu: float = 0.8
    overhead_s: float = 2e-3
    lower_tier: bool = True
    tokens_per_step: int = 8192
    comm_backend: str = "ag_rs"

    def __post_init__(self) -> None:
        if self.shape.moe is None or self.shape.latent is None:
            raise ConfigError(f"{self.shape.name} is not MLA with experts in the table, which this cost model needs")
        check_context_parallel_size(self.ranks, self.dcp, self.shape.heads, self.shape.kv_heads)

    @property
    def moe(self) -> ExpertShape:
        assert self.shape.moe is not None
        return self.shape.moe

    @property
    def latent(self) -> LatentShape:
        assert self.shape.latent is not None
        return self.shape.latent

    @property
    def plain_values(self) -> int:
        """Weights outside the experts that a step reads: attention, dense layers, LM head."""
        dense = self.moe.dense_layers * 3 * self.shape.hidden_size * self.moe.ffn
        return self.shape.layers * self.shape.attention_values + dense + self.moe.vocab * self.shape.hidden_size

    @property
    def weight_bytes_per_rank(self) -> float:
        moe, hidden = self.moe, self.shape.hidden_size
        expert_values = (self.shape.layers - moe.dense_layers) * (moe.experts + moe.shared_experts)
        experts = expert_values * self.experts.bytes_for(3 * hidden * moe.expert_ffn)
        return (experts + 2 * (self.plain_values + moe.vocab * hidden)) / self.ranks

    @property
    def kv_bytes_per_token(self) -> float:
        """Of one rank."""
        return kv_bytes_per_token_per_rank(self.shape, self.ranks, self.dcp, self.kv)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of context that fit, all ranks together."""
        pool = self.utilization * self.hardware.memory_bytes - self.reserve_bytes - self.weight_bytes_per_rank
        return int(pool / self.kv_bytes_per_token)

    def seconds(self, load: StepLoad) -> float:
        """One step, on any rank: all do the same."""
        shape, hw, tokens = self.shape, self.hardware, load.decodes + load.prefill_tokens
        moe, latent = self.moe, self.latent
        expert_flops = 2 * tokens * (shape.layers - moe.dense_layers) * 3 * shape.hidden_size * moe.expert_ffn
        expert_flops *= moe.experts_per_token + moe.shared_experts
        matrices = self._compute(expert_flops, "float4") + self._compute(2 * tokens * self.plain_values, "bfloat16")
        weights = expert_read_bytes(shape, moe, tokens, self.experts) + 2 * self.plain_values
        reads = weights / self.ranks / (self.mbu * hw.bandwidth)
        layer_heads = 2 * shape.layers * shape.heads
        absorbed = layer_heads * (shape.key_dim + shape.value_dim) * load.decode_context
        kv_reads = load.decode_context * self.kv_bytes_per_token / (self.mbu * hw.bandwidth)
        decode = max(kv_reads, self._compute(absorbed, "float8"))
        plain = layer_heads * (latent.qk_nope + latent.qk_rope + latent.v_head) * load.prefill_pairs
        up = layer_heads * latent.kv_lora_rank * (latent.qk_nope + latent.v_head) * load.prefill_context
        prefill = self._compute(plain + up, "bfloat16")
        return max(matrices, reads) + decode + prefill + self.exchange_seconds(load) + self.overhead_s

    def exchange_seconds(self, load: StepLoad) -> float:
        """Two all-reduces of hidden states a layer; with DCP the decodes' exchange, and prefills gather context."""
        shape, fabric, tokens = self.shape, self.fabric, load.decodes + load.prefill_tokens
        reduced = 2 * (self.ranks - 1) * tokens * shape.hidden_size * 2 / self.ranks
        layer = 2 * (fabric.seconds(reduced, self.ranks) + fabric.seconds(0, self.ranks))
        if self.dcp > 1 and load.decodes:
            layer += exchange_seconds(shape, fabric, self.ranks, self.dcp, load.decodes, self.comm_backend)
        if self.dcp > 1 and load.prefill_context:
            values = shape.cached_values * load.prefill_context * (self.dcp - 1) // self.dcp
            layer += fabric.seconds(self.kv.bytes_for(values), self.dcp)
        return shape.layers * layer

    def _compute(self, flops: float, dtype: str) -> float:
        return flops / self.ranks / (self.mfu * self.hardware.peak(dtype))
