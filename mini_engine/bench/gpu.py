"""What the kernels make of a GPU: the rows that `mini-engine bench --device cuda` adds to its report.

    decode attention   share of peak bandwidth, from the SLOPE of time over bytes between two context lengths: what a
                       launch costs is in both points and falls out; one point would blame it on the bandwidth
                       and the same of latent attention, for the heads of DeepSeek-V2-Lite
    decode step        of Qwen3-8B with random weights, one sequence of 2048 tokens, launched kernel by kernel and from
                       a CUDA graph, against the least time in which weights, keys and values can be read
    prefill            model FLOPs utilisation (MFU) of one chunk: 2 FLOPs a parameter and token, and the attention

Under ten minutes on any card of the table; needs about 20 GB. Sources: the floor is book 8.2.1's; MFU as in Chowdhery
et al. 2022 (PaLM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mini_engine.analysis.dcp_shapes import AttentionShape
from mini_engine.batch import Batch
from mini_engine.bench.rows import row
from mini_engine.checkpoint import expected_shapes
from mini_engine.config import ModelConfig
from mini_engine.graphs import DecodeGraphs, Run, Shape
from mini_engine.kernels.gpus import GPU, GPUS, OTHER_CARDS
from mini_engine.kernels.specimens import LATENT_MODELS, MODELS
from mini_engine.kv_cache import KVCache
from mini_engine.layer_attention import PagedLayers
from mini_engine.linear import Int4Groups
from mini_engine.model import Decoder
from mini_engine.triton_attention import TritonAttention
from mini_engine.triton_mla import TritonMLAAttention
from mini_engine.triton_ops import TritonOps

Timer = Callable[[Callable[[], Any]], float]  # seconds of one call
BLOCK_SIZE = 16
CONTEXTS = (2048, 8192)
CHUNK = 2048
BOOK_STEP = ("the book's eager step", 26.26)  # ms, batch 1, 2048 tokens, RTX PRO 6000 (experiment 8-1)


def rows(device: torch.device, timer: Timer) -> Iterator[dict[str, Any]]:
    """All figures, in the format of `bench.rows.row`."""
    card = find_gpu(torch.cuda.get_device_name(device))
    model = MODELS["Qwen3-8B"]
    for num_seqs in (1, 16, 64):
        yield decode_attention(model, num_seqs, CONTEXTS, device, timer, card)
    yield latent_decode_attention(LATENT_MODELS["DeepSeek-V2-Lite"], 64, CONTEXTS, device, timer, card)
    yield from steps(model, CHUNK, device, timer, card)


def find_gpu(name: str) -> GPU | None:
    """The card whose peaks are known, by what the driver calls it; None for another one."""
    return next((card for card in (*GPUS.values(), *OTHER_CARDS) if card.device_name in name), None)


def decode_attention(
    model: ModelConfig, num_seqs: int, contexts: tuple[int, int], device: torch.device, timer: Timer, card: GPU | None
) -> dict[str, Any]:
    """Time of one layer's decode attention at two context lengths, and the bandwidth of the difference."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    num_blocks = 1 + num_seqs * -(-max(contexts) // BLOCK_SIZE)
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, kv_heads, dim, device=device, dtype=torch.bfloat16).unbind(0)
    q = torch.randn(num_seqs, heads, dim, device=device, dtype=torch.bfloat16)
    seconds = []
    for context in contexts:
        batch = uniform_batch(num_seqs, 1, context).to(device)
        attention = TritonAttention(batch, dim**-0.5, torch.bfloat16)
        seconds.append(timer(lambda run=attention: run(q, *caches)))  # type: ignore[misc]
    name = f"decode attention, batch {num_seqs}"
    return _bandwidth_row(name, "K and V", 2 * num_seqs * kv_heads * dim * 2, contexts, seconds, card)


def latent_decode_attention(
    shape: AttentionShape,
    num_seqs: int,
    contexts: tuple[int, int],
    device: torch.device,
    timer: Timer,
    card: GPU | None,
) -> dict[str, Any]:
    """The same of one layer of an MLA model, whose latents are keys and values at once."""
    num_blocks = 1 + num_seqs * -(-max(contexts) // BLOCK_SIZE)
    cache = torch.randn(num_blocks, BLOCK_SIZE, 1, shape.key_dim, device=device, dtype=torch.bfloat16)
    q = torch.randn(num_seqs, shape.heads, shape.key_dim, device=device, dtype=torch.bfloat16)
    seconds = []
    for context in contexts:
        batch = uniform_batch(num_seqs, 1, context).to(device)
        attention = TritonMLAAttention(batch, shape.key_dim**-0.5, torch.bfloat16)
        seconds.append(timer(lambda run=attention: run(q, cache, cache[..., : shape.value_dim])))  # type: ignore[misc]
    name = f"latent decode attention, {shape.heads} heads, batch {num_seqs}"
    return _bandwidth_row(name, "latents", num_seqs * shape.key_dim * 2, contexts, seconds, card)


def _bandwidth_row(
    name: str, what: str, bytes_per_key: int, contexts: tuple[int, int], seconds: list[float], card: GPU | None
) -> dict[str, Any]:
    rate = bytes_per_key * (contexts[1] - contexts[0]) / (seconds[1] - seconds[0])
    return row(
        name,
        rate / 1e12,
        "TB/s",
        f"bytes of {what} over time, between contexts of {contexts[0]} and {contexts[1]}; one layer of the model",
        bound=card.bandwidth / 1e12 if card else None,
        us=[second * 1e6 for second in seconds],
    )


def steps(
    model: ModelConfig,
    context: int,
    device: torch.device,
    timer: Timer,
    card: GPU | None,
    capture: Callable[[Run], Run] | None = None,
) -> Iterator[dict[str, Any]]:
    """One decode step, without and with a graph, and the prefill of `context` tokens; random bf16 weights."""
    dtype = torch.bfloat16
    decoder = Decoder(model, RandomCheckpoint(model), dtype, device, max_model_len=2 * context)
    kv = KVCache(model, 2 + context // BLOCK_SIZE, BLOCK_SIZE, dtype, device)
    ops = TritonOps()

    def forward(batch: Batch) -> torch.Tensor:
        return decoder.forward(batch, PagedLayers(batch, kv, ops, decoder.scale, dtype), ops)

    decode, prefill = uniform_batch(1, 1, context), uniform_batch(1, context, context)
    read = model.weight_read_bytes("bfloat16") + context * model.kv_bytes_per_token("bfloat16")
    floor = read / card.bandwidth * 1e3 if card else None
    graphs = DecodeGraphs(forward, BLOCK_SIZE, 1, context, device, capture)
    how = f"batch 1, {context} tokens; bound: weights and KV read once"
    with torch.inference_mode():
        eager = timer(lambda: forward(decode.to(device))) * 1e3
        replayed = timer(lambda: graphs.run(decode, Shape(1, context))) * 1e3
        chunk = timer(lambda: forward(prefill.to(device)))
    yield row("decode step, eager", eager, "ms", how, floor, BOOK_STEP, less_is_better=True)
    yield row("decode step, CUDA graph", replayed, "ms", how, floor, ("eager", eager), less_is_better=True)
    # Only the last token's logits are computed, so the vocabulary's parameters do no work for the others.
    pairs, layers = context * (context + 1) // 2, model.num_hidden_layers
    flops = 2 * context * layers * model.layer_params + 4 * pairs * model.q_size * layers
    yield row(
        "prefill, one chunk",
        flops / chunk / 1e12,
        "TFLOP/s",
        f"{context} tokens of one sequence; bound: the card's dense bf16 peak, so the share is the MFU",
        card.bf16_flops / 1e12 if card else None,
    )


def uniform_batch(num_seqs: int, query_len: int, context: int) -> Batch:
    """Sequences of `context` tokens whose last query_len are new; block ids shuffled over the pool. On the host."""
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(num_seqs * blocks, generator=torch.Generator().manual_seed(0)) + 1
    block_table = order.view(num_seqs, blocks)
    positions = torch.arange(context - query_len, context).repeat(num_seqs)
    seqs = torch.arange(num_seqs).repeat_interleave(query_len)
    starts = torch.arange(0, num_seqs * query_len + 1, query_len)
    return Batch(
        input_ids=torch.zeros(num_seqs * query_len, dtype=torch.int64),
        positions=positions,
        slot_mapping=block_table[seqs, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=starts.int(),
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_table=block_table.int(),
        logits_indices=starts[1:] - 1,
        max_query_len=query_len,
        max_seq_len=context,
        num_decodes=num_seqs if query_len == 1 else 0,
        query_lens=(query_len,) * num_seqs,
        context_lens=(context - query_len,) * num_seqs,
    )


class RandomCheckpoint:
    """Weights of the right shapes and no meaning: the time of a step does not depend on their values."""

    eos_token_ids: frozenset[int] = frozenset()
    revision = "random"

    def __init__(self, config: ModelConfig):
        self.name, self.config, self.shapes = "random", config, expected_shapes(config)

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, out: torch.Tensor, rows: range | None = None, columns: range | None = None) -> None:
        out.normal_(std=0.02)

    def holds_int4(self, name: str) -> bool:
        return False

    def read_int4(self, name: str) -> Int4Groups:
        raise NotImplementedError("random weights are dense")

    def tokenizer(self) -> Any:
        raise NotImplementedError("random weights have no tokenizer")

    def close(self) -> None: ...

    def __enter__(self) -> RandomCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None: ...


def cuda_timer(call: Callable[[], Any]) -> float:
    """Median seconds of a call, the cache of the GPU emptied between calls."""
    from triton.testing import do_bench

    return do_bench(call, warmup=100, rep=500, return_mode="median") / 1e3
