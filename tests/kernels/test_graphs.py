"""Decode steps at fixed shapes. Here the "graph" is the function itself, run anew on the same buffers; on a GPU the
same engine test replays real CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mini_engine import EngineConfig, LLMEngine, SamplingParams
from mini_engine.graphs import DecodeGraphs, Run, Shape, ladder_of_contexts, ladder_of_sizes
from tests.builders import tiny_llama_dir
from tests.kernels.paged import make_batch

PROMPTS = [[5, 6, 7], [9] * 11, list(range(20, 29))]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_ladders() -> None:
    assert ladder_of_sizes(1) == [1]
    assert ladder_of_sizes(3) == [1, 2, 3]
    assert ladder_of_sizes(8) == [1, 2, 4, 8]
    assert ladder_of_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert ladder_of_contexts(700) == [700]
    assert ladder_of_contexts(5000) == [1024, 2048, 4096, 5000]


def make_engine(model: Path, device: torch.device, **options) -> LLMEngine:
    config = EngineConfig(
        str(model),
        dtype="float32",
        device=device.type,  # type: ignore[arg-type]
        block_size=4,
        num_gpu_blocks_override=24,
        max_model_len=64,
        max_num_seqs=6,
        attention_backend="triton",
        **options,
    )
    engine = LLMEngine(config)
    engine.runner.model.embedding[0] = 1.0  # transformers leaves row 0 at zero, and with it what padding would write
    return engine


def answer(engine: LLMEngine) -> list[list[int]]:
    records = [engine.add_request(str(i), {"prompt_token_ids": p}, GREEDY) for i, p in enumerate(PROMPTS)]
    while engine.has_unfinished_requests():
        engine.step()
    return [record.outputs[0].token_ids for record in records]


@pytest.mark.slow
def test_tokens_and_cache_are_those_of_eager_steps(tmp_path: Path, device: torch.device) -> None:
    model = tiny_llama_dir(tmp_path)
    eager = make_engine(model, device, enforce_eager=True)
    assert eager.runner.graphs is None
    expected = answer(eager)

    engine = make_engine(model, device)
    replays: list[Shape] = []
    recorded: list[Run] = []
    if device.type == "cpu":

        def capture(run: Run) -> Run:
            run()
            recorded.append(run)
            return run

        runner = engine.runner
        runner.graphs = DecodeGraphs(runner.forward, 4, 6, 64, device, capture)
    assert engine.runner.graphs is not None
    original = engine.runner.graphs.run

    def counted(batch, shape):
        replays.append(shape)
        return original(batch, shape)

    engine.runner.graphs.run = counted  # type: ignore[method-assign]
    assert answer(engine) == expected
    assert replays == [Shape(4, 64)] * 4, "three decodes are padded to four rows"
    assert len(recorded) == (1 if device.type == "cpu" else 0)
    # Padding rows wrote nowhere: the pools are the same, the null block and the unused ones included.
    for mine, theirs in ((engine.runner.kv.k, eager.runner.kv.k), (engine.runner.kv.v, eager.runner.kv.v)):
        torch.testing.assert_close(mine, theirs)
        assert not mine[:, 0].any()


def test_a_step_that_does_more_than_decode_has_no_shape() -> None:
    def shape(query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> Shape | None:
        table = torch.zeros((len(query_lens), 16), dtype=torch.int32)
        return graphs.shape_for(make_batch(query_lens, context_lens, table))

    graphs = DecodeGraphs(lambda batch: batch.input_ids, 4, 4, 64, torch.device("cpu"), lambda run: run)
    assert shape((1, 1, 1), (4, 9, 30)) == Shape(4, 64)
    assert shape((1, 1), (63, 0)) == Shape(2, 64)
    assert shape((1, 2), (4, 9)) is None
    assert shape((1,) * 5, (4,) * 5) is None
    assert shape((1,), (64,)) is None
