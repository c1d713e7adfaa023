"""Who runs a step: this process alone, or the ranks of a tensor-parallel group.

    tensor_parallel_size 1       ModelRunner, here
    "local"                      LocalRunner: all ranks in this process, a thread each
    "mp"                         ProcessRunner: a process a rank, started here
    "external_launcher"          ModelRunner for one rank of the group that torchrun started; every process runs the
                                 same engine on the same requests, and draws the same tokens from the same logits

A scheduled step goes to all ranks as what to copy and a `Batch`; sequences stay with the scheduler.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch

from mini_engine import sizing
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.groups import Collective, LocalGroup, run_ranks
from mini_engine.parallel import ModelShard
from mini_engine.process_runner import ProcessRunner
from mini_engine.runner import ModelRunner
from mini_engine.scheduler_output import SchedulerOutput
from mini_engine.torch_group import TorchGroup, backend_of


class Runner(Protocol):
    """What the engine asks of a runner, however many ranks are behind it. Figures in blocks are one rank's, and all
    ranks' alike; bytes are one rank's, the first one's."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def kv_bytes(self) -> int: ...

    def execute(self, output: SchedulerOutput) -> torch.Tensor: ...

    def close(self) -> None: ...


def make_runner(config: EngineConfig, checkpoint: Checkpoint) -> Runner:
    """The runner that the config asks for. Raises ConfigError for sizes that do not fit the model, the launcher or the
    machine's GPUs."""
    ModelShard.of(config, checkpoint.config)  # its refusals, before anybody waits for other ranks
    size, backend = config.tensor_parallel_size, config.distributed_executor_backend
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if backend == "auto":
        backend = "external_launcher" if launched else "mp"
    if backend == "external_launcher":
        if launched != size:
            raise ConfigError(
                f"tensor_parallel_size {size} does not go with the {launched} processes of torchrun: make them equal"
                if launched
                else "distributed_executor_backend 'external_launcher' is for a script that torchrun starts; use 'mp'"
            )
        device = sizing.resolve_device(config.device)
        check_num_gpus(device, int(os.environ["LOCAL_WORLD_SIZE"]))
        return ModelRunner(config, checkpoint, TorchGroup.from_environment(backend_of(device.type)))
    if size == 1:
        return ModelRunner(config, checkpoint)
    if backend == "local":
        return LocalRunner(config, checkpoint)
    check_num_gpus(sizing.resolve_device(config.device), size)
    return ProcessRunner(config, checkpoint)


def check_num_gpus(device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError unless each of a machine's ranks gets a GPU of its own, where they compute on GPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need as many GPUs, PyTorch sees {torch.cuda.device_count()}: lower "
            f"tensor_parallel_size, or use device 'cpu' or distributed_executor_backend 'local'"
        )


class LocalRunner:
    """All ranks in this process: for tests and notebooks, which can look at each rank's pool and collectives."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.groups = LocalGroup.create(config.tensor_parallel_size)
        self.ranks = run_ranks(self.groups, lambda group: ModelRunner(config, checkpoint, group))
        first = self.ranks[0]
        self.num_blocks, self.num_host_blocks = first.num_blocks, first.num_host_blocks
        self.max_model_len, self.device, self.dtype = first.max_model_len, first.device, first.dtype
        self.kv_dtype = first.kv_dtype

    @property
    def weight_bytes(self) -> int:
        return self.ranks[0].weight_bytes

    @property
    def kv_bytes(self) -> int:
        return self.ranks[0].kv_bytes

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        """As `ModelRunner.execute`; the first rank's logits, which are all ranks'."""
        batch = self.ranks[0].prepare(output)

        def one(group: LocalGroup) -> torch.Tensor:
            rank = self.ranks[group.rank]
            rank.swap(output)
            return rank.run(output, batch)

        return run_ranks(self.groups, one)[0]

    def collectives(self) -> list[Collective]:
        """What the first rank exchanged so far in its tensor-parallel group, then in its context-parallel group."""
        first = self.ranks[0]
        groups = [first.group, *([first.context_group] if first.context_group.size > 1 else [])]
        return [record for group in groups for record in group.records]

    def close(self) -> None:
        """Threads live for a step only."""
