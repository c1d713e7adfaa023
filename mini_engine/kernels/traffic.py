"""Count the bytes a kernel loads, in Triton's interpreter, where every load can be watched.

What one load instruction of one program reads twice (two keys of one block look up the same table entry) counts once,
as the hardware joins it; what two programs, or two instructions, read counts twice. Caches are not modelled: this is
the traffic a kernel asks for. Needs a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton

from mini_engine.errors import EngineError

CONTEXTS = (300, 17)  # tokens: across a split and within a block


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


def attention_traffic(heads: int, kv_heads: int, dim: int, query_len: int) -> tuple[int, int]:
    """(bytes of K and V that paged attention loads, the least possible) for sequences of CONTEXTS tokens in bf16."""
    from mini_engine.kernels.paged_attention import paged_attention

    block_size, int32 = 16, torch.int32
    blocks = [-(-context // block_size) for context in CONTEXTS]
    k, v = torch.zeros(2, 1 + sum(blocks), block_size, kv_heads, dim, dtype=torch.bfloat16).unbind(0)
    table = torch.zeros(len(CONTEXTS), max(blocks), dtype=int32)
    table[0, : blocks[0]] = torch.arange(1, 1 + blocks[0])
    table[1, : blocks[1]] = torch.arange(1 + blocks[0], 1 + sum(blocks))
    q = torch.zeros(len(CONTEXTS) * query_len, heads, dim, dtype=torch.bfloat16)
    starts = torch.arange(0, len(q) + 1, query_len, dtype=int32)
    with counting_loads(k=k, v=v) as counter:
        paged_attention(
            q, k, v, starts, torch.tensor(CONTEXTS, dtype=int32), table, dim**-0.5, query_len, max(CONTEXTS)
        )
    return sum(counter.loaded.values()), 2 * sum(CONTEXTS) * kv_heads * dim * k.itemsize


def measure() -> list[dict[str, Any]]:
    """A row for decode and for verification, at the heads of each model of the gates."""
    from mini_engine.kernels.specimens import MODELS

    rows = []
    for name, model in MODELS.items():
        for kind, query_len in (("decode", 1), ("verify", 8)):
            loaded, least = attention_traffic(
                model.num_attention_heads, model.num_key_value_heads, model.head_dim, query_len
            )
            rows.append({"kernel": "paged_attention", "shape": f"{name} {kind}", "loaded": loaded, "least": least})
    return rows


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


if __name__ == "__main__":
    print(json.dumps(measure()))
