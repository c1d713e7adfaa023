"""The decoder that writes every layer's results to the same tensors: bit for bit what the plain one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine import LLM, SamplingParams
from mini_engine.linear import Linear
from mini_engine.model import Decoder
from mini_engine.numba_decoder import NumbaDecoder
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir, to_gguf

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# Chunks of a prompt beside new tokens of others, and steps of new tokens alone.
PROMPTS = [{"prompt_token_ids": [(5 * i + 11 * j * j) % 256 for j in range(n)]} for i, n in enumerate((1, 3, 40, 17))]


def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, run_layers) -> list[torch.Tensor]:
    """The logits of every step."""
    seen: list[torch.Tensor] = []
    forward = Decoder.forward

    def watched(*given: Any) -> torch.Tensor:
        seen.append(forward(*given))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(NumbaDecoder, "run_layers", run_layers)
        patch.setattr(Decoder, "forward", watched)
        llm.generate(PROMPTS, PARAMS)
    return seen


def allocated(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products of layers that made a tensor of their own, in all steps."""
    count = 0

    def product(self: Linear, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += self is not llm.engine.runner.model.head
        return torch.mm(x, self._transposed)

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "__call__", product)
        llm.generate(PROMPTS, PARAMS)
    return count


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "bfloat16"}])
@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir])
def test_same_bits_as_the_plain_decoder(build, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    more: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "enable_prefix_caching": False}
    llm = LLM(str(build(tmp_path)), max_num_batched_tokens=24, **more, **options)
    assert type(llm.engine.runner.model) is NumbaDecoder
    plain, buffered = (run(llm, monkeypatch, of.run_layers) for of in (Decoder, NumbaDecoder))
    assert len(plain) == len(buffered) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, buffered, strict=True))
    assert allocated(llm, monkeypatch) == 0


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_other_weights_go_the_plain_way(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """4-bit weights, which have a product of their own, and other dtypes."""
    path = str(to_gguf(tiny_llama_dir(tmp_path), tmp_path / "q4.gguf", "Q4_1"))
    llm = LLM(path, dtype=dtype, kv_cache_memory_bytes=2**22)
    assert type(llm.engine.runner.model) is NumbaDecoder
    calls = []

    def write(self: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(self)
        torch.mm(x, self._transposed, out=out)

    monkeypatch.setattr(Linear, "write", write)
    llm.generate(PROMPTS, PARAMS)
    assert bool(calls) == (dtype == "float32")


def test_a_single_layer_of_4_bits_is_enough(tmp_path: Path):
    """A file may hold some matrices in another form."""
    path = str(to_gguf(tiny_llama_dir(tmp_path), tmp_path / "q4.gguf", "Q4_1"))
    model = LLM(path, dtype="auto", kv_cache_memory_bytes=2**22).engine.runner.model
    last = model.layers[-1].down
    for layer in model.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            setattr(layer, name, Linear(getattr(layer, name).weight))
    assert model._is_dense
    del model._is_dense
    model.layers[-1].down = last
    assert not model._is_dense


@pytest.mark.parametrize(
    "build, options",
    [
        (tiny_llama_dir, {"attention_backend": "torch"}),
        (tiny_llama_dir, {"tensor_parallel_size": 2, "distributed_executor_backend": "local"}),
        (tiny_deepseek_v2_dir, {}),
    ],
)
def test_others_have_their_own_decoder(build, options: dict, tmp_path: Path):
    llm = LLM(str(build(tmp_path)), dtype="float32", kv_cache_memory_bytes=2**22, **options)
    runner = llm.engine.runner
    assert not any(type(one.model) is NumbaDecoder for one in getattr(runner, "ranks", [runner]))
