"""What the gates look at: every kernel, at the shapes of Qwen3-8B and SmolLM2-135M; latent attention at DeepSeek's.

A specimen calls a launcher on tensors without memory, and states the least a launch has to do: bytes, FLOPs and runs
of the main loop. Decode: 64 sequences of 2048 tokens. Verify: 16 of them, 7 drafts each. Chunk: one prompt of 2048,
for latent attention its last 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from mini_engine.analysis.dcp_shapes import AttentionShape, get_attention
from mini_engine.config import ModelConfig
from mini_engine.kernels.copy_blocks import copy_blocks, copy_blocks_kernel
from mini_engine.kernels.merge import merge_kernel, merge_states
from mini_engine.kernels.paged_attention import paged_attention, paged_attention_kernel
from mini_engine.kernels.paged_mla import mla_tile_config, paged_mla, paged_mla_kernel
from mini_engine.kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_kernel
from mini_engine.kernels.rms_norm import rms_norm, rms_norm_kernel
from mini_engine.kernels.rope import rope, rope_kernel
from mini_engine.kernels.swiglu import swiglu, swiglu_kernel
from mini_engine.kernels.tiles import tile_config

MODELS = {
    "Qwen3-8B": ModelConfig("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, max_position_embeddings=40960),
    "SmolLM2-135M": ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, True, max_position_embeddings=8192),
}
LATENT_MODELS = {name: get_attention(name.lower()) for name in ("DeepSeek-V2-Lite", "DeepSeek-V3")}  # 16, 128 heads
BF16_BYTES = 2
BLOCK_SIZE = 16
NUM_BLOCKS = 16384
CONTEXT = 2048
BATCH = 64
NUM_COPIES = 16
LATENT_CHUNK = 128  # longer ones are attended in the naive form, see latent_attention.py


@dataclass(frozen=True)
class Specimen:
    """least_bytes to read and write; flops for the tensor cores; loops: runs of the main loop over all programs."""

    kernel: JITFunction
    shape: str
    call: Callable[[], Any]
    least_bytes: int
    flops: int = 0
    loops: int = 0


def specimens() -> Iterator[Specimen]:
    for name, model in MODELS.items():
        yield _attention(name, model, "decode", BATCH, 1)
        yield _attention(name, model, "verify", BATCH // 4, 8)
        yield _attention(name, model, "chunk", 1, CONTEXT)
        yield from _small_kernels(name, model)
    for name, shape in LATENT_MODELS.items():
        yield _latent_attention(name, shape, "decode", BATCH, 1)
        yield _latent_attention(name, shape, "chunk", 1, LATENT_CHUNK)
    few = "DeepSeek-V2-Lite"  # like shards of the others; with more heads a verification has the tiles of a decode
    yield _latent_attention(few, LATENT_MODELS[few], "verify", BATCH // 4, 8)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(name: str, model: ModelConfig, kind: str, num_seqs: int, query_len: int) -> Specimen:
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    tokens, group = num_seqs * query_len, heads // kv_heads
    qkv = _meta(tokens, heads + 2 * kv_heads, dim)
    cache = _meta(model.num_hidden_layers, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim)[0]
    index = {"dtype": torch.int32}
    config = tile_config(query_len, group, dim, BF16_BYTES)

    # Keys that the tiles of one sequence walk through: the last tile of queries sees all, the ones before it fewer.
    block_q = config.block_m // group
    seen = [min(CONTEXT, CONTEXT - query_len + first + block_q) for first in range(0, query_len, block_q)]
    loops = num_seqs * kv_heads * sum(-(-keys // config.tile) for keys in seen)
    kv_bytes = 2 * num_seqs * CONTEXT * kv_heads * dim * BF16_BYTES

    def call() -> Any:
        return paged_attention(
            qkv[:, :heads], cache, cache, _meta(num_seqs + 1, **index), _meta(num_seqs, **index),
            _meta(num_seqs, CONTEXT // BLOCK_SIZE, **index), dim**-0.5, query_len, CONTEXT,
            out=_meta(tokens, heads, dim),
        )  # fmt: skip

    return Specimen(
        paged_attention_kernel,
        f"{name} {kind}: {num_seqs} x {query_len} new of {CONTEXT}",
        call,
        least_bytes=kv_bytes + 2 * tokens * heads * dim * BF16_BYTES,
        flops=loops * 4 * config.block_m * config.tile * dim,
        loops=loops,
    )


def _latent_attention(name: str, shape: AttentionShape, kind: str, num_seqs: int, query_len: int) -> Specimen:
    heads, dim, rank = shape.heads, shape.key_dim, shape.value_dim
    tokens = num_seqs * query_len
    cache = _meta(shape.layers, NUM_BLOCKS, BLOCK_SIZE, 1, dim)[0]
    index = {"dtype": torch.int32}
    config = mla_tile_config(query_len, heads, BF16_BYTES)

    tile_heads = min(heads, config.block_m)
    block_q = config.block_m // tile_heads
    seen = [min(CONTEXT, CONTEXT - query_len + first + block_q) for first in range(0, query_len, block_q)]
    loops = num_seqs * -(-heads // tile_heads) * sum(-(-keys // config.tile) for keys in seen)

    def call() -> Any:
        return paged_mla(
            _meta(tokens, heads, dim), cache, rank, _meta(num_seqs + 1, **index), _meta(num_seqs, **index),
            _meta(num_seqs, CONTEXT // BLOCK_SIZE, **index), dim**-0.5, query_len, CONTEXT,
            out=_meta(tokens, heads, rank),
        )  # fmt: skip

    return Specimen(
        paged_mla_kernel,
        f"{name} {kind}: {num_seqs} x {query_len} new of {CONTEXT}",
        call,
        least_bytes=(num_seqs * CONTEXT * dim + tokens * heads * (dim + rank)) * BF16_BYTES,
        flops=loops * 2 * config.block_m * config.tile * (dim + rank),
        loops=loops,
    )


def _small_kernels(name: str, model: ModelConfig) -> Iterator[Specimen]:
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    qkv = _meta(BATCH, heads + 2 * kv_heads, dim)
    k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    caches = _meta(2, model.num_hidden_layers, NUM_BLOCKS, BLOCK_SIZE, kv_heads, dim).unbind(0)
    splits = tile_config(1, heads // kv_heads, dim, BF16_BYTES).num_splits(CONTEXT)
    states = _meta(splits, BATCH, heads, dim, dtype=torch.float32), _meta(splits, BATCH, heads, dtype=torch.float32)
    slots = _meta(BATCH, dtype=torch.int64)
    hidden, rows = _meta(BATCH, model.hidden_size), f"{BATCH} tokens"
    copies = [(2 * i + 1, 2 * i + 2) for i in range(NUM_COPIES)]
    table = _meta(model.max_position_embeddings, 2, dim)
    block = BLOCK_SIZE * kv_heads * dim * BF16_BYTES

    def specimen(kernel: JITFunction, shape: str, call: Callable[[], Any], least_bytes: int) -> Specimen:
        return Specimen(kernel, f"{name} {shape}", call, least_bytes)

    yield specimen(
        merge_kernel, f"{rows}, {splits} splits", lambda: merge_states(*states, out=_meta(BATCH, heads, dim)),
        BATCH * heads * dim * (4 * splits + BF16_BYTES),
    )  # fmt: skip
    yield specimen(
        reshape_and_cache_kernel, rows, lambda: reshape_and_cache(k, v, caches[0][0], caches[1][0], slots),
        4 * BATCH * kv_heads * dim * BF16_BYTES,
    )  # fmt: skip
    yield specimen(
        copy_blocks_kernel, f"{NUM_COPIES} blocks", lambda: copy_blocks(caches[0], caches[1], copies),
        4 * NUM_COPIES * model.num_hidden_layers * block,
    )  # fmt: skip
    yield specimen(
        rms_norm_kernel, f"{rows} x {model.hidden_size}",
        lambda: rms_norm(hidden, _meta(model.hidden_size), model.rms_norm_eps), 2 * hidden.nbytes,
    )  # fmt: skip
    if model.qk_norm:
        yield specimen(
            rms_norm_kernel, f"{rows} x {heads} heads",
            lambda: rms_norm(qkv[:, :heads], _meta(dim), model.rms_norm_eps),
            2 * BATCH * heads * dim * BF16_BYTES,
        )  # fmt: skip
    yield specimen(
        rope_kernel, f"{rows} x {heads + kv_heads} heads", lambda: rope(qkv[:, : heads + kv_heads], table, slots),
        2 * BATCH * (heads + kv_heads + 1) * dim * BF16_BYTES,
    )  # fmt: skip
    yield specimen(
        swiglu_kernel, f"{rows} x {model.intermediate_size}",
        lambda: swiglu(_meta(BATCH, 2 * model.intermediate_size)), 3 * BATCH * model.intermediate_size * BF16_BYTES,
    )  # fmt: skip
