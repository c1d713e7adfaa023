"""Command line options made of EngineConfig's fields: vLLM's names with dashes, types and defaults from the fields.

Never imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mini_engine.config import EngineConfig

PARALLEL = (
    "tensor_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
    "dcp_comm_backend",
    "dcp_q_replicate",
    "distributed_executor_backend",
    "num_padded_query_heads",
)
SERVING = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "attention_backend",
    "enforce_eager",
    "async_scheduling",
)
SHORT = {
    "tensor_parallel_size": ("-tp",),
    "decode_context_parallel_size": ("-dcp",),
    "cp_kv_cache_interleave_size": ("--dcp-kv-cache-interleave-size",),  # vLLM's newer name
}
HELP = {
    "tensor_parallel_size": "ranks that share the weights",
    "decode_context_parallel_size": "ranks among them that share each sequence's KV by tokens",
    "cp_kv_cache_interleave_size": "consecutive tokens on one of them",
    "dcp_comm_backend": "how their partial results are combined",
    "dcp_q_replicate": "each computes all queries, in place of gathering them",
    "distributed_executor_backend": "who runs the ranks: threads, processes, or torchrun",
    "num_padded_query_heads": "fill the query heads up to so many, where their number cannot be shared out",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens a step computes at most",
    "enable_prefix_caching": "find computed prefixes again",
    "scheduling_policy": "who is admitted first",
    "num_gpu_blocks_override": "blocks of the KV pool, whatever memory says",
    "gpu_memory_utilization": "share of the GPU's memory to use",
    "attention_backend": "our GPU or CPU kernels, or plain torch",
    "enforce_eager": "no CUDA graphs",
    "async_scheduling": "schedule a step while the one before it runs",
}


def add_engine_options(parser: argparse.ArgumentParser, *names: str) -> None:
    """An option for each of these fields of EngineConfig. `given_options` collects them."""
    hints = get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name not in names:
            continue
        flags = (f"--{field.name.replace('_', '-')}", *SHORT.get(field.name, ()))
        default = "" if field.default is None else " (default: %(default)s)"
        settings = _kind(hints[field.name]) | {"default": field.default, "help": HELP[field.name] + default}
        parser.add_argument(*flags, dest=field.name, **settings)
    parser.set_defaults(engine_options=(*(parser.get_default("engine_options") or ()), *names))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of all options that `add_engine_options` added."""
    return {name: getattr(args, name) for name in getattr(args, "engine_options", ())}


def _kind(hint: Any) -> dict[str, Any]:
    """What argparse makes of a field's type: bool, int, float, Literal, or one of these or None."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    (kind,) = {*get_args(hint), hint} & {int, float, str} - {NoneType}
    return {"type": kind, "metavar": "N" if kind is int else "X"}
