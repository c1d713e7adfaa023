"""How a scheduler and an engine are set up: frozen dataclasses, checked once.

Never imports torch: the scheduler and the simulator use these without paying for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from mini_engine.context_shard import ContextShard
from mini_engine.errors import ConfigError
from mini_engine.model_config import DTYPE_BYTES, Llama3RopeScaling, ModelConfig, dtype_bytes

__all__ = ["DTYPE_BYTES", "EngineConfig", "Llama3RopeScaling", "ModelConfig", "SchedulerConfig", "dtype_bytes"]


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler and the block pool need to know: limits in tokens, sequences and blocks.

    The first six are vLLM's. Ours: `batching` ("fixed" admits a new batch only when the last one has ended),
    `admission` ("reserve" sets the blocks of the whole generation aside when a request is admitted, book 8.1.2;
    "preempt" admits on the known tokens and takes blocks back from the latest request when they run out),
    `eviction_policy` (which free block of a known prefix is given out first, see eviction.py), `preemption_mode` (a
    victim's tokens are computed again, or wait in `num_host_blocks` blocks of host memory, see swap.py).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    batching: Literal["continuous", "fixed"] = "continuous"
    admission: Literal["preempt", "reserve"] = "preempt"
    max_model_len: int = 2048
    block_size: int = 16
    num_blocks: int = 1024
    eviction_policy: Literal["lru", "fifo", "lfu", "value"] = "lru"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
        _at_least(self, 0, "long_prefill_token_threshold")
        if self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is the null block and holds no tokens), got {self.num_blocks}"
            )
        _one_of(self, "scheduling_policy", "fcfs", "priority")
        _one_of(self, "batching", "continuous", "fixed")
        _one_of(self, "admission", "preempt", "reserve")
        _one_of(self, "eviction_policy", "lru", "fifo", "lfu", "value")
        _one_of(self, "preemption_mode", "recompute", "swap")
        _at_least(self, 0, "num_host_blocks")
        if self.preemption_mode == "swap" and self.num_host_blocks == 0:
            raise ConfigError("preemption_mode 'swap' needs host memory to swap to: set num_host_blocks above 0")
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} cuts prompts into chunks: it needs "
                f"enable_chunked_prefill=True"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a whole prompt must fit one step: max_num_batched_tokens "
                f"{self.max_num_batched_tokens} is below max_model_len {self.max_model_len}; raise the first, lower "
                f"the second, or set enable_chunked_prefill=True"
            )


@dataclass(frozen=True)
class EngineConfig:
    """How to set up an engine. Names and meanings are vLLM's wherever vLLM has them.

    model: "smollm2-135m", a directory, a GGUF file, or a Hugging Face repository id.
    dtype: "auto" is float32 on a CPU and the model's own dtype on a GPU. On a CPU it also lets a single rank multiply
        by a GGUF file's 4-bit weights as they are; "float32" does not, and is what several ranks compute either way.
    max_model_len: longest prompt plus output in tokens; None takes the model's own limit.
    kv_cache_memory_bytes: size of the KV pool; None is 1 GiB on a CPU, and on a GPU what `gpu_memory_utilization`
        leaves beside the weights.
    num_gpu_blocks_override: the number of blocks itself, null block included, whatever memory says.
    enforce_eager: on a GPU, launch every kernel of a decode step anew in place of replaying CUDA graphs.
    attention_backend: "triton" runs our GPU kernels, "numba" our CPU kernels, "torch" plain torch; "auto" chooses.
    swap_space_bytes: host memory for the KV of preempted requests, with preemption_mode "swap".
    host_cache_bytes: host memory for known prefixes that the pool gives up, 0 for none (see prefix_tier.py).
    host_cache_admission: which of them: all, those used before, or those worth more than their upkeep (host_tier.py).
    host_link_bytes_per_s, prefill_flops_per_s: what a fetch and what computing anew are priced by; None measures both
        on this machine when the engine starts (see host_cache.py).
    async_scheduling: schedule the next step, and hand out the last one's tokens, while a step runs.
    tensor_parallel_size: ranks that share every matrix by heads and inner widths.
    decode_context_parallel_size: ranks among them that share each sequence's KV by tokens where they would all hold
        the same; cp_kv_cache_interleave_size: consecutive tokens that go to one of them (see context_shard.py).
    dcp_comm_backend, dcp_q_replicate: how their partial results are combined, and whether each computes the queries of
        all of them in place of gathering these (see dcp.py).
    distributed_executor_backend: who runs the ranks: "mp" a process each, started here, "local" threads of this
        process, "external_launcher" the processes that torchrun started, of which this is one; "auto" is the last
        under torchrun, else "mp".
    num_padded_query_heads: fill the query heads up to so many with heads of zeros, which change nothing, where the
        model's own number cannot be shared out.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    attention_backend: Literal["auto", "torch", "triton", "numba"] = "auto"
    enforce_eager: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    batching: Literal["continuous", "fixed"] = "continuous"
    admission: Literal["preempt", "reserve"] = "preempt"
    eviction_policy: Literal["lru", "fifo", "lfu", "value"] = "lru"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    swap_space_bytes: int = 0
    host_cache_bytes: int = 0
    host_cache_admission: Literal["always", "second_sight", "value"] = "always"
    host_link_bytes_per_s: float | None = None
    prefill_flops_per_s: float | None = None
    async_scheduling: bool = False
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_comm_backend: Literal["ag_rs", "a2a"] = "ag_rs"
    dcp_q_replicate: bool = False
    distributed_executor_backend: Literal["auto", "local", "mp", "external_launcher"] = "auto"
    num_padded_query_heads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            _one_of(self, name, "auto", *DTYPE_BYTES)
        _one_of(self, "device", "auto", "cpu", "cuda")
        _one_of(self, "attention_backend", "auto", "torch", "triton", "numba")
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least(self, 1, name)
        _at_least(self, 0, "seed", "swap_space_bytes", "host_cache_bytes")
        _one_of(self, "host_cache_admission", "always", "second_sight", "value")
        for name in ("host_link_bytes_per_s", "prefill_flops_per_s"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, or None to measure it, got {rate!r}")
        if self.host_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"host_cache_bytes {self.host_cache_bytes:,} keeps prefixes that nobody looks up: set "
                f"enable_prefix_caching=True, or host_cache_bytes to 0"
            )
        if self.num_gpu_blocks_override is not None:
            _at_least(self, 2, "num_gpu_blocks_override")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")
        if self.preemption_mode == "swap" and self.swap_space_bytes == 0:
            raise ConfigError(
                "preemption_mode 'swap' needs host memory to swap to: set swap_space_bytes above 0, or "
                "preemption_mode to 'recompute'"
            )
        self._check_parallel()
        # its refusals, before a model is loaded
        self.scheduler_config(self.max_model_len or 1, num_blocks=2, num_host_blocks=min(1, self.swap_space_bytes))

    def _check_parallel(self) -> None:
        """What can be said of ranks without the model; the rest is `parallel.ModelShard`'s."""
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        _at_least(
            self, 1, "block_size", "tensor_parallel_size", "decode_context_parallel_size", "cp_kv_cache_interleave_size"
        )
        _one_of(self, "dcp_comm_backend", "ag_rs", "a2a")
        _one_of(self, "distributed_executor_backend", "auto", "local", "mp", "external_launcher")
        if not isinstance(self.dcp_q_replicate, bool):
            raise ConfigError(f"dcp_q_replicate must be True or False, got {self.dcp_q_replicate!r}")
        if self.num_padded_query_heads is not None:
            _at_least(self, 1, "num_padded_query_heads")
        if tp % dcp:
            raise ConfigError(
                f"decode_context_parallel_size {dcp} must divide tensor_parallel_size {tp}: its ranks are among those"
            )
        ContextShard(0, dcp, self.cp_kv_cache_interleave_size).check_block_size(self.block_size)
        for name in ("async_scheduling", "host_cache_bytes"):
            if tp > 1 and getattr(self, name):
                raise ConfigError(
                    f"{name} works on one rank only so far, this engine has tensor_parallel_size {tp}: set one of them "
                    f"to its default"
                )

    @property
    def virtual_block_size(self) -> int:
        """Tokens of a sequence that one block id stands for, on all ranks together."""
        return self.block_size * self.decode_context_parallel_size

    def scheduler_config(self, max_model_len: int, num_blocks: int, num_host_blocks: int = 0) -> SchedulerConfig:
        """The scheduler's part of it, once the model and the memory are known."""
        shared = {field.name for field in dataclasses.fields(SchedulerConfig)}
        values = {name: value for name, value in dataclasses.asdict(self).items() if name in shared}
        values |= {"max_model_len": max_model_len, "num_blocks": num_blocks, "num_host_blocks": num_host_blocks}
        values["block_size"] = self.virtual_block_size
        return SchedulerConfig(**values)


def _at_least(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def _one_of(config: Any, name: str, *allowed: str) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
