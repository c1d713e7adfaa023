"""The whole engine on the Triton backend: the same greedy tokens as on torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import EngineConfig, LLMEngine, SamplingParams
from mini_engine.engine import Prompt
from mini_engine.errors import ConfigError
from mini_engine.ops import TorchOps, make_ops
from mini_engine.triton_ops import TritonOps
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir

BLOCK = 4
SHARED = list(range(20, 31))  # the second prompt finds two blocks of it in the prefix cache
PROMPTS = [SHARED + [41, 42, 43, 44], SHARED + [51], [61, 62, 63]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Watched:
    """Counts what a backend's steps are called with."""

    def __init__(self, engine: LLMEngine):
        self.copies = 0
        self.batches: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        ops: Any = engine.runner.ops
        copy_blocks, attention = ops.copy_blocks, ops.attention

        def count_copies(kv, copies):
            self.copies += len(copies)
            copy_blocks(kv, copies)

        def count_batches(batch, *rest):
            self.batches.append((batch.query_lens, batch.context_lens))
            return attention(batch, *rest)

        ops.copy_blocks, ops.attention = count_copies, count_batches


def run(model: Path, backend: Any, device: torch.device) -> tuple[list[list[int]], Watched]:
    kind: Any = device.type
    engine = LLMEngine(
        EngineConfig(
            str(model), dtype="float32", device=kind, block_size=BLOCK, num_gpu_blocks_override=64,
            max_model_len=64, max_num_batched_tokens=12, attention_backend=backend,
        )
    )  # fmt: skip
    watched = Watched(engine)
    records = []

    def add(i: int, params: SamplingParams) -> None:
        prompt: Prompt = {"prompt_token_ids": PROMPTS[i]}
        records.append(engine.add_request(str(i), prompt, params))

    add(0, GREEDY)
    for _ in range(3):
        engine.step()
    add(1, GREEDY)
    add(2, replace(GREEDY, n=2))  # a fork: its partly filled last block is copied before it is written
    while engine.has_unfinished_requests():
        engine.step()
    return [list(output.token_ids) for record in records for output in record.outputs], watched


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir, tiny_deepseek_v2_dir])
def test_same_tokens_as_torch(build, tmp_path, device):
    model = build(tmp_path, num_attention_heads=6, num_key_value_heads=2)
    want, _ = run(model, "torch", device)
    got, watched = run(model, "triton", device)
    assert got == want
    lens = [(new, context) for news, contexts in watched.batches for new, context in zip(news, contexts, strict=True)]
    assert any(new > 8 for new, _ in lens), "no long chunk was computed"
    assert (3, 12) in lens, "no chunk followed the one before"
    assert (4, 8) in lens, "no prefix was found in the cache"
    assert any(set(news) > {1} for news, _ in watched.batches), "no batch was mixed"
    assert watched.copies, "no block was copied"


def test_backends_are_chosen_by_device():
    assert isinstance(make_ops("auto", torch.device("cpu")), TorchOps)
    assert isinstance(make_ops("auto", torch.device("cuda")), TritonOps)
    assert isinstance(make_ops("torch", torch.device("cuda")), TorchOps)


def test_triton_without_a_gpu_is_refused():
    """In a process of its own: here the interpreter is on, which may run on a CPU."""
    script = (
        "import torch; from mini_engine.ops import make_ops; from mini_engine.errors import ConfigError\n"
        "try: make_ops('triton', torch.device('cpu'))\n"
        "except ConfigError as error: print(error)"
    )
    environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "'triton' needs a CUDA device, this engine runs on cpu" in result.stdout


def test_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="attention_backend.*auto.*torch.*triton"):
        EngineConfig(attention_backend="flash")  # type: ignore[arg-type]
