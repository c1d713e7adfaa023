"""What an engine gets of the machine: device, dtype, context length, and how many KV blocks fit."""

from __future__ import annotations

import torch

from mini_engine.config import EngineConfig, ModelConfig
from mini_engine.errors import ConfigError, PoolTooSmall

DEFAULT_CPU_KV_BYTES = 1 << 30
MIB = 1 << 20


def resolve_device(device: str) -> torch.device:
    """'auto' takes a GPU if there is one. Raises ConfigError for 'cuda' where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise ConfigError(
            f"device 'cuda' is not there: PyTorch {torch.__version__} is built for {build} and sees "
            f"{torch.cuda.device_count()} GPUs. Use device 'cpu', or install a CUDA build on a machine with a GPU"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def resolve_dtype(dtype: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """'auto' computes in float32 on a CPU, where bf16 products are slower, and in the model's own dtype on a GPU."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else model.dtype
    return getattr(torch, dtype)


def uses_int4(config: EngineConfig, device: torch.device) -> bool:
    """Whether a GGUF file's 4-bit weights are used as they are: on a CPU, unless a dtype was asked for."""
    return device.type == "cpu" and config.dtype == "auto"


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The model's own limit, or the shorter one asked for. Raises ConfigError for a longer one."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the {limit} positions the model was made for")
    return config.max_model_len or limit


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)


def block_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV block in all layers; `dtype` is the one the model computes in."""
    return config.block_size * model.kv_bytes_per_token(str(kv_dtype(config, dtype)).removeprefix("torch."))


def num_kv_blocks(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, unloaded_bytes: int = 0
) -> int:
    """KV blocks, null block included, that fit the memory asked for, or else the memory there is.

    unloaded_bytes: weights that are still to come, on a GPU whose free memory decides.
    Raises PoolTooSmall when not even one block for tokens fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    budget = config.kv_cache_memory_bytes
    if budget is None:
        on_cpu = device.type == "cpu"
        budget = DEFAULT_CPU_KV_BYTES if on_cpu else _free_gpu_bytes(config, model, device, dtype) - unloaded_bytes
    size = block_bytes(config, model, dtype)
    if budget < 2 * size:
        raise PoolTooSmall(
            f"{budget / MIB:.1f} MiB for the KV cache hold {max(0, budget // size)} blocks of {size / MIB:.2f} MiB "
            f"({config.block_size} tokens), at least 2 are needed (one is the null block). Raise "
            f"kv_cache_memory_bytes to {2 * size:,} or more, or lower block_size"
        )
    return budget // size


def num_host_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Blocks that the host keeps for preempted requests. Raises PoolTooSmall when it is to keep some and none fits."""
    if config.preemption_mode != "swap":
        return 0
    size = block_bytes(config, model, dtype)
    if config.swap_space_bytes < size:
        raise PoolTooSmall(
            f"swap_space_bytes {config.swap_space_bytes:,} holds no block of {size:,} bytes ({config.block_size} "
            f"tokens). Raise it to {size:,} or more, or set preemption_mode to 'recompute'"
        )
    return config.swap_space_bytes // size


def num_cache_slots(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Blocks that the host keeps of prefixes the pool gave up. Raises PoolTooSmall for a budget below one block."""
    size = block_bytes(config, model, dtype)
    if 0 < config.host_cache_bytes < size:
        raise PoolTooSmall(
            f"host_cache_bytes {config.host_cache_bytes:,} holds no block of {size:,} bytes ({config.block_size} "
            f"tokens). Raise it to {size:,} or more, or set it to 0"
        )
    return config.host_cache_bytes // size


def _free_gpu_bytes(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """What `gpu_memory_utilization` of the card leaves beside what is used and the largest step's activations."""
    free, total = torch.cuda.mem_get_info(device)
    width = 4 * model.hidden_size + model.q_size + 2 * model.kv_size + 3 * model.intermediate_size
    activations = config.max_num_batched_tokens * width * dtype.itemsize
    if model.mla:  # a chunk in naive form projects its whole context, and masks it for each of its tokens
        each = model.num_attention_heads * model.mla.naive_dim + config.max_num_batched_tokens
        activations += resolve_max_model_len(config, model) * each * dtype.itemsize
    logits = 2 * config.max_num_seqs * model.vocab_size * 4
    return int(total * config.gpu_memory_utilization) - (total - free) - activations - logits
