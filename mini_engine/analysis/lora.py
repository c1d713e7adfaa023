"""Low-rank adapters in a batch: what they occupy, what is still shared (book 8.2.1).

An adapter corrects a matrix W of shape in × out by A·B, with A of in × rank and B of rank × out. The base weights serve
every row of the batch; A and B serve only the rows of their own adapter.
Source: Hu et al., "LoRA" (2021); batching: S-LoRA and Punica (2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from mini_engine.analysis.formats import BF16, NumberFormat
from mini_engine.analysis.inputs import AnalysisError, dense, whole
from mini_engine.config import ModelConfig


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(in, out) of each matrix of a layer, under the names of Hugging Face's modules. Raises AnalysisError for MLA."""
    dense(model, "the size of an adapter")
    hidden, ffn = model.hidden_size, model.intermediate_size
    return {
        "q_proj": (hidden, model.q_size),
        "k_proj": (hidden, model.kv_size),
        "v_proj": (hidden, model.kv_size),
        "o_proj": (model.q_size, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }


def lora_bytes(
    model: ModelConfig,
    rank: int,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    adapter: NumberFormat = BF16,
) -> int:
    """Bytes of one adapter on these matrices of every layer: rank · (in + out) values each.

    Raises AnalysisError for a matrix the model does not have.
    """
    whole(1, rank=rank)
    shapes = matrix_shapes(model)
    values = 0
    for target in targets:
        if target not in shapes:
            raise AnalysisError(f"a layer has no matrix {target!r}, only {', '.join(shapes)}")
        values += rank * sum(shapes[target])
    return model.num_hidden_layers * adapter.bytes_for(values)


def rows_per_adapter(adapters: Iterable[Hashable]) -> dict[Hashable, int]:
    """Rows of each group of a decode batch, given the adapter of each request. None stands for the base model alone."""
    return dict(Counter(adapter for adapter in adapters if adapter is not None))


def lora_intensity(adapters: Iterable[Hashable], adapter: NumberFormat = BF16) -> float:
    """Operations for each byte of adapter weights read in the batch's low-rank products: 2 · mean rows / bytes.

    The base weights see the whole batch (`weight_intensity`); spread over many adapters, this part falls back to 1.
    Raises AnalysisError for a batch without adapters.
    """
    groups = rows_per_adapter(adapters)
    if not groups:
        raise AnalysisError("no request of the batch uses an adapter")
    return 2 * sum(groups.values()) / len(groups) / (adapter.bits_per_value / 8)


def lora_read_bytes(adapters: Iterable[Hashable], adapter_bytes: int) -> int:
    """Bytes of adapters one decode round reads: each that occurs in the batch once."""
    whole(0, adapter_bytes=adapter_bytes)
    return len(rows_per_adapter(adapters)) * adapter_bytes


def requests_beside_adapters(free_bytes: int, adapters: int, adapter_bytes: int, request_bytes: int) -> int:
    """Requests whose KV still fits once `adapters` are resident. How many of each are two separate decisions.

    A hundred rank-16 adapters of the book's model take 1.43 GiB; a hundred unshared 8K contexts take 112.5.
    """
    whole(0, free_bytes=free_bytes, adapters=adapters, adapter_bytes=adapter_bytes)
    whole(1, request_bytes=request_bytes)
    return max(0, free_bytes - adapters * adapter_bytes) // request_bytes
