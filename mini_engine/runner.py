"""Where a scheduled step meets the machine: the weights, the KV pool, and the forward pass. One rank of a group."""

from __future__ import annotations

import torch

from mini_engine import sizing
from mini_engine.batch import Batch, build_batch, localize
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.context_parallel import ContextParallelLayers
from mini_engine.graphs import DecodeGraphs
from mini_engine.groups import Group, LocalGroup
from mini_engine.host_kv import HostKV
from mini_engine.kv_cache import KVCache
from mini_engine.layer_attention import LayerAttention, PagedLayers
from mini_engine.mla import MLADecoder
from mini_engine.model import Decoder
from mini_engine.ops import make_ops, resolve_backend
from mini_engine.parallel import ModelShard
from mini_engine.scheduler import SchedulerOutput
from mini_engine.sharded_checkpoint import ShardedCheckpoint


class ModelRunner:
    """Holds a rank's weights and KV pool, and runs steps over them.

    group: the tensor-parallel group, None for a rank alone. All of its ranks run the same steps.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, group: Group | None = None):
        self.config = config
        self.group = group or LocalGroup.create(1)[0]
        self.shard = ModelShard.of(config, checkpoint.config, self.group.rank)
        self.context_group = self.group.split(self.shard.context.size)
        self.block_size = config.block_size
        self.device = sizing.resolve_device(config.device)
        self.ops = make_ops(config.attention_backend, self.device)
        self.dtype = sizing.resolve_dtype(config.dtype, checkpoint.config, self.device)
        self.max_model_len = sizing.resolve_max_model_len(config, checkpoint.config)
        part: Checkpoint = checkpoint if self.shard.is_whole else ShardedCheckpoint(checkpoint, self.shard)
        model, int4 = part.config, sizing.uses_int4(config, self.device)
        self.model = self._decoder(model)(model, part, self.dtype, self.device, self.max_model_len, int4, self.group)
        self.num_blocks = self._agreed(sizing.num_kv_blocks(config, model, self.device, self.dtype))
        self.kv = KVCache(model, self.num_blocks, self.block_size, sizing.kv_dtype(config, self.dtype), self.device)
        self.num_host_blocks = sizing.num_host_blocks(config, model, self.dtype)
        self.num_cache_slots = sizing.num_cache_slots(config, model, self.dtype)
        num_slots = self.num_host_blocks + self.num_cache_slots  # of preempted sequences, then of the prefix tier
        self.host = HostKV(self.kv, num_slots) if num_slots else None
        self.graphs: DecodeGraphs | None = None
        alone = self.group.size == 1  # a recording of several ranks' collectives could not be tried
        # Which experts a step uses decides what it launches: no recording can be replayed.
        replayable = self.ops.replayable and alone and model.moe is None
        if self.device.type == "cuda" and replayable and not config.enforce_eager:
            self.graphs = DecodeGraphs(
                self.forward, self.block_size, config.max_num_seqs, self.max_model_len, self.device
            )

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.model.weight_tensors())

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv.k.dtype

    @property
    def kv_bytes(self) -> int:
        return self.kv.nbytes

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """Copy what is to be copied, run the model; logits [R, vocab] float32, one row a sequence that draws."""
        self.swap(output)
        return self.run(output, self.prepare(output))

    def swap(self, output: SchedulerOutput) -> None:
        """Move the step's blocks to the host and back."""
        if self.host is not None:
            self.host.move(self.kv, output.swap_out, output.swap_in)

    def prepare(self, output: SchedulerOutput) -> Batch:
        """The step's index arrays, from the sequences as they are now; the same for all ranks."""
        return build_batch(output, self.config.virtual_block_size)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, batch: Batch) -> torch.Tensor:
        """The rest of `execute`: copies within the pool, and the model."""
        self.ops.copy_blocks(self.kv, output.block_copies)
        shape = self.graphs.shape_for(batch) if self.graphs else None
        if self.graphs and shape:
            return self.graphs.run(batch, shape)
        return self.forward(localize(batch, self.shard.context, self.block_size).to(self.device))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model on a batch that lies on the device, with this rank's slots. Every rank gets all logits."""
        logits = self.model.forward(batch, self._attention(batch), self.ops)
        return self.group.all_gather(logits, dim=1)[:, : self.shard.model.vocab_size]

    def _attention(self, batch: Batch) -> LayerAttention:
        shared = (batch, self.kv, self.ops, self.model.scale, self.dtype)
        if self.context_group.size == 1:
            return PagedLayers(*shared)
        shard, config = self.shard, self.config
        return ContextParallelLayers(
            *shared, shard.context, self.context_group, config.dcp_comm_backend, shard.q_replicate
        )

    def _decoder(self, model: ModelConfig) -> type[Decoder] | type[MLADecoder]:
        if model.mla:
            return MLADecoder
        if resolve_backend(self.config.attention_backend, self.device) == "numba" and self.group.size == 1:
            from mini_engine.numba_decoder import NumbaDecoder

            return NumbaDecoder
        return Decoder

    def _agreed(self, number: int) -> int:
        """The least of all ranks' numbers: what memory each has left may differ."""
        numbers = self.group.all_gather(torch.tensor([number], device=self.device))
        return int(numbers.min())

    def close(self) -> None:
        """Nothing runs that would have to end."""
