"""Count the bytes a kernel loads, in Triton's interpreter, where every load can be watched.

What one load instruction of one program reads twice (two keys of one block look up the same table entry) counts once,
as the hardware joins it; what two programs, or two instructions, read counts twice. Caches are not modelled: this is
the traffic a kernel asks for. Needs a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from mini_engine.errors import EngineError

CONTEXTS = (300, 17)  # tokens: across a split and within a block
BLOCK_SIZE = 16


class LoadCounter:
    """Bytes loaded from each of the named tensors."""

    def __init__(self, **tensors: torch.Tensor):
        self.ranges = {name: _extent(tensor) for name, tensor in tensors.items()}
        self.loaded = dict.fromkeys(tensors, 0)

    def note(self, addresses: np.ndarray, itemsize: int) -> None:
        """One load instruction of one program; addresses of the elements that are not masked off."""
        unique = np.unique(addresses)
        for name, (start, end) in self.ranges.items():
            self.loaded[name] += int(((unique >= start) & (unique < end)).sum()) * itemsize


@contextmanager
def counting_loads(**tensors: torch.Tensor) -> Iterator[LoadCounter]:
    """Count what kernels load from these tensors while the context is open. Raises EngineError when not interpreted."""
    if not triton.knobs.runtime.interpret:
        raise EngineError("loads can be counted only in a process started with TRITON_INTERPRET=1")
    from triton.runtime.interpreter import InterpreterBuilder

    counter, original = LoadCounter(**tensors), InterpreterBuilder.create_masked_load

    def watched(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        loaded = np.broadcast_to(mask.data, ptrs.data.shape)
        counter.note(ptrs.data[loaded], max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        return original(builder, ptrs, mask, *rest)

    InterpreterBuilder.create_masked_load = watched
    try:
        yield counter
    finally:
        InterpreterBuilder.create_masked_load = original


class Pool(NamedTuple):
    """Sequences of CONTEXTS tokens, their last query_len new."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_blocks: int
    tokens: int


def make_pool(query_len: int) -> Pool:
    blocks = [-(-context // BLOCK_SIZE) for context in CONTEXTS]
    table = torch.zeros(len(CONTEXTS), max(blocks), dtype=torch.int32)
    table[0, : blocks[0]] = torch.arange(1, 1 + blocks[0])
    table[1, : blocks[1]] = torch.arange(1 + blocks[0], 1 + sum(blocks))
    tokens = len(CONTEXTS) * query_len
    starts = torch.arange(0, tokens + 1, query_len, dtype=torch.int32)
    return Pool(starts, torch.tensor(CONTEXTS, dtype=torch.int32), table, 1 + sum(blocks), tokens)


def attention_traffic(heads: int, kv_heads: int, dim: int, query_len: int) -> tuple[int, int]:
    """(bytes of K and V that paged attention loads, the least possible) for sequences of CONTEXTS tokens in bf16."""
    from mini_engine.kernels.paged_attention import paged_attention

    pool = make_pool(query_len)
    k, v = torch.zeros(2, pool.num_blocks, BLOCK_SIZE, kv_heads, dim, dtype=torch.bfloat16).unbind(0)
    q = torch.zeros(pool.tokens, heads, dim, dtype=torch.bfloat16)
    with counting_loads(k=k, v=v) as counter:
        paged_attention(q, k, v, *pool[:3], dim**-0.5, query_len, max(CONTEXTS))
    return sum(counter.loaded.values()), 2 * sum(CONTEXTS) * kv_heads * dim * k.itemsize


def latent_traffic(heads: int, dim: int, kv_lora_rank: int, query_len: int) -> tuple[int, int]:
    """(bytes of latents that paged_mla loads, each latent once) for sequences of CONTEXTS tokens in bf16."""
    from mini_engine.kernels.paged_mla import paged_mla

    pool = make_pool(query_len)
    cache = torch.zeros(pool.num_blocks, BLOCK_SIZE, 1, dim, dtype=torch.bfloat16)
    q = torch.zeros(pool.tokens, heads, dim, dtype=torch.bfloat16)
    with counting_loads(cache=cache) as counter:
        paged_mla(q, cache, kv_lora_rank, *pool[:3], dim**-0.5, query_len, max(CONTEXTS))
    return counter.loaded["cache"], sum(CONTEXTS) * dim * cache.itemsize


def measure() -> list[dict[str, Any]]:
    """A row for decode and for verification, at the heads of each model of the gates."""
    from mini_engine.kernels.specimens import LATENT_MODELS, MODELS

    kinds = {"decode": 1, "verify": 8}
    rows = []
    for name, model in MODELS.items():
        for kind, query_len in kinds.items():
            loaded, least = attention_traffic(
                model.num_attention_heads, model.num_key_value_heads, model.head_dim, query_len
            )
            rows.append({"kernel": "paged_attention", "shape": f"{name} {kind}", "loaded": loaded, "least": least})
    for name, kind in (("DeepSeek-V2-Lite", "decode"), ("DeepSeek-V2-Lite", "verify"), ("DeepSeek-V3", "decode")):
        shape = LATENT_MODELS[name]
        loaded, least = latent_traffic(shape.heads, shape.key_dim, shape.value_dim, kinds[kind])
        rows.append({"kernel": "paged_mla", "shape": f"{name} {kind}", "loaded": loaded, "least": least})
    return rows


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


if __name__ == "__main__":
    print(json.dumps(measure()))
