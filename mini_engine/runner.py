"""Where a scheduled step meets the machine: the weights, the KV pool, and the forward pass."""

from __future__ import annotations

import torch

from mini_engine import sizing
from mini_engine.batch import Batch, build_batch
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import EngineConfig
from mini_engine.graphs import DecodeGraphs
from mini_engine.host_kv import HostKV
from mini_engine.kv_cache import KVCache
from mini_engine.model import Decoder
from mini_engine.ops import make_ops
from mini_engine.scheduler import SchedulerOutput


class ModelRunner:
    """Holds the weights and the KV pool, and runs steps over them."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        model = checkpoint.config
        self.block_size = config.block_size
        self.device = sizing.resolve_device(config.device)
        self.ops = make_ops(config.attention_backend, self.device)
        self.dtype = sizing.resolve_dtype(config.dtype, model, self.device)
        self.max_model_len = sizing.resolve_max_model_len(config, model)
        int4 = sizing.uses_int4(config, self.device)
        self.model = Decoder(model, checkpoint, self.dtype, self.device, self.max_model_len, int4)
        self.num_blocks = sizing.num_kv_blocks(config, model, self.device, self.dtype)
        self.kv = KVCache(model, self.num_blocks, self.block_size, sizing.kv_dtype(config, self.dtype), self.device)
        self.num_host_blocks = sizing.num_host_blocks(config, model, self.dtype)
        self.num_cache_slots = sizing.num_cache_slots(config, model, self.dtype)
        num_slots = self.num_host_blocks + self.num_cache_slots  # of preempted sequences, then of the prefix tier
        self.host = HostKV(self.kv, num_slots) if num_slots else None
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda" and self.ops.replayable and not config.enforce_eager:
            self.graphs = DecodeGraphs(
                self.forward, self.block_size, config.max_num_seqs, self.max_model_len, self.device
            )

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.model.weight_tensors())

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """Copy what is to be copied, run the model; logits [R, vocab] float32, one row a sequence that draws."""
        self.swap(output)
        return self.run(output, self.prepare(output))

    def swap(self, output: SchedulerOutput) -> None:
        """Move the step's blocks to the host and back."""
        if self.host is not None:
            self.host.move(self.kv, output.swap_out, output.swap_in)

    def prepare(self, output: SchedulerOutput) -> Batch:
        """The step's index arrays, from the sequences as they are now."""
        return build_batch(output, self.block_size)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput, batch: Batch) -> torch.Tensor:
        """The rest of `execute`: copies within the pool, and the model."""
        self.ops.copy_blocks(self.kv, output.block_copies)
        shape = self.graphs.shape_for(batch) if self.graphs else None
        if self.graphs and shape:
            return self.graphs.run(batch, shape)
        return self.forward(batch.to(self.device))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The model on a batch that lies on the device."""
        attention = self.ops.attention(batch, self.block_size, self.model.scale, self.dtype)
        return self.model.forward(batch, self.kv, attention, self.ops)
