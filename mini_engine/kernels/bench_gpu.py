"""What the kernels make of a GPU, as JSON: `python -m mini_engine.kernels.bench_gpu`. Ends at once where there is none.

    decode attention   share of peak bandwidth, from the SLOPE of time over bytes between two context lengths: what a
                       launch costs is in both points and falls out; one point would blame it on the bandwidth
    prefill            model FLOPs utilisation (MFU) of one chunk: 2 FLOPs a parameter and token, and the attention
    decode step        of Qwen3-8B with random weights, one sequence of 2048 tokens, against the least time in which the
                       weights and its keys and values can be read

Eager: every kernel launched from Python. Sources: the floor is book 8.2.1's; MFU as in Chowdhery et al. 2022 (PaLM).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from mini_engine.batch import Batch
from mini_engine.checkpoint import expected_shapes
from mini_engine.config import ModelConfig
from mini_engine.kernels.gpus import GPU, GPUS, OTHER_CARDS
from mini_engine.kernels.specimens import MODELS
from mini_engine.kv_cache import KVCache
from mini_engine.linear import Int4Groups
from mini_engine.model import Decoder
from mini_engine.triton_attention import TritonAttention
from mini_engine.triton_ops import TritonOps

Timer = Callable[[Callable[[], Any]], float]  # seconds of one call
BLOCK_SIZE = 16
CONTEXTS = (2048, 8192)
CHUNK = 2048


def report(device: torch.device, timer: Timer) -> dict[str, Any]:
    """All figures. Under ten minutes on any GPU of the table; needs about 20 GB."""
    card = find_gpu(torch.cuda.get_device_name(device))
    model = MODELS["Qwen3-8B"]
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "peak_of": card.card if card else None,
        "decode_attention": [decode_attention(model, batch, CONTEXTS, device, timer, card) for batch in (1, 16, 64)],
        "steps": steps(model, device, timer, card),
    }


def find_gpu(name: str) -> GPU | None:
    """The card whose peaks are known, by what the driver calls it; None for another one."""
    return next((card for card in (*GPUS.values(), *OTHER_CARDS) if card.device_name in name), None)


def decode_attention(
    model: ModelConfig, num_seqs: int, contexts: tuple[int, int], device: torch.device, timer: Timer, card: GPU | None
) -> dict[str, Any]:
    """Time of one layer's decode attention at two context lengths, and the bandwidth of the difference."""
    heads, kv_heads, dim = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    num_bytes = [2 * num_seqs * context * kv_heads * dim * 2 for context in contexts]
    num_blocks = 1 + num_seqs * -(-max(contexts) // BLOCK_SIZE)
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, kv_heads, dim, device=device, dtype=torch.bfloat16).unbind(0)
    q = torch.randn(num_seqs, heads, dim, device=device, dtype=torch.bfloat16)
    seconds = []
    for context in contexts:
        attention = TritonAttention(uniform_batch(num_seqs, 1, context, device), dim**-0.5, torch.bfloat16)
        seconds.append(timer(lambda run=attention: run(q, *caches)))  # type: ignore[misc]
    bandwidth = (num_bytes[1] - num_bytes[0]) / (seconds[1] - seconds[0])
    return {
        "batch": num_seqs,
        "contexts": contexts,
        "us": [second * 1e6 for second in seconds],
        "kv_bytes": num_bytes,
        "slope_bytes_per_s": bandwidth,
        "share_of_peak": bandwidth / card.bandwidth if card else None,
    }


def steps(model: ModelConfig, device: torch.device, timer: Timer, card: GPU | None) -> dict[str, Any]:
    """One decode step, and the prefill of one chunk, of the whole model with random weights."""
    dtype = torch.bfloat16
    decoder = Decoder(model, RandomCheckpoint(model), dtype, device, max_model_len=2 * CHUNK)
    kv = KVCache(model, 2 + CHUNK // BLOCK_SIZE, BLOCK_SIZE, dtype, device)
    ops = TritonOps()

    def step(query_len: int) -> float:
        batch = uniform_batch(1, query_len, CHUNK, device)
        attention = ops.attention(batch, BLOCK_SIZE, decoder.scale, dtype)
        with torch.inference_mode():
            return timer(lambda: decoder.forward(batch, kv, attention, ops))

    decode, prefill = step(1), step(CHUNK)
    read = model.weight_read_bytes("bfloat16") + CHUNK * model.kv_bytes_per_token("bfloat16")
    pairs = CHUNK * (CHUNK + 1) // 2
    # Only the last token's logits are computed, so the embedding's parameters do no work for the others.
    flops = (
        2 * CHUNK * model.num_hidden_layers * model.layer_params + 4 * pairs * model.q_size * model.num_hidden_layers
    )
    return {
        "decode_ms": decode * 1e3,
        "decode_floor_ms": read / card.bandwidth * 1e3 if card else None,
        "decode_bytes_per_s": read / decode,
        "prefill_ms": prefill * 1e3,
        "prefill_flops_per_s": flops / prefill,
        "prefill_mfu": flops / prefill / card.bf16_flops if card else None,
    }


def uniform_batch(num_seqs: int, query_len: int, context: int, device: torch.device) -> Batch:
    """Sequences of `context` tokens whose last query_len are new; block ids shuffled over the pool."""
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(num_seqs * blocks, generator=torch.Generator().manual_seed(0)) + 1
    block_table = order.view(num_seqs, blocks)
    positions = torch.arange(context - query_len, context).repeat(num_seqs)
    rows = torch.arange(num_seqs).repeat_interleave(query_len)
    starts = torch.arange(0, num_seqs * query_len + 1, query_len)
    batch = Batch(
        input_ids=torch.zeros(num_seqs * query_len, dtype=torch.int64),
        positions=positions,
        slot_mapping=block_table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
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
    return batch.to(device)


class RandomCheckpoint:
    """Weights of the right shapes and no meaning: the time of a step does not depend on their values."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, config: ModelConfig):
        self.name, self.config, self.shapes = "random", config, expected_shapes(config)

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, out: torch.Tensor) -> None:
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


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: no CUDA device (PyTorch {torch.__version__})", file=sys.stderr)
        return 0
    print(json.dumps(report(torch.device("cuda"), cuda_timer), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
