"""Which part of a model each rank holds: the parts of all ranks, put side by side, are the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.analysis.shards import kv_bytes_per_token_per_card, weight_bytes_per_card
from mini_engine.checkpoint import Checkpoint
from mini_engine.config import EngineConfig
from mini_engine.context_shard import ContextShard
from mini_engine.errors import ConfigError, ModelLoadError
from mini_engine.model_config import ModelConfig
from mini_engine.parallel import ModelShard
from mini_engine.sharded_checkpoint import ShardedCheckpoint
from mini_engine.weights import open_checkpoint
from tests.builders import tiny_deepseek_v2_dir, tiny_llama_dir, tiny_qwen3_dir, to_gguf

ATTN, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


def whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    out = torch.empty(checkpoint.shape(name))
    checkpoint.read(name, out)
    return out


def parts(checkpoint: Checkpoint, name: str, size: int, **settings: Any) -> list[torch.Tensor]:
    """The tensor as each rank reads it, into memory that was not zero before."""
    found = []
    for rank in range(size):
        part = ShardedCheckpoint(checkpoint, ModelShard(checkpoint.config, rank, size, **settings))
        out = torch.full(part.shape(name), torch.nan)
        part.read(name, out)
        found.append(out)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_dir(tmp_path_factory.mktemp("model"), num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="module", params=["safetensors", "F32", "Q8_0", "Q4_1", "BF16"])
def checkpoint(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory):
    path = directory
    if request.param != "safetensors":
        path = to_gguf(directory, tmp_path_factory.mktemp("gguf") / "tiny.gguf", request.param)
    with open_checkpoint(str(path)) as opened:
        yield opened


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (ATTN + "q_proj.weight", 0),
        (ATTN + "o_proj.weight", 1),
        (MLP + "gate_proj.weight", 0),
        (MLP + "up_proj.weight", 0),
        (MLP + "down_proj.weight", 1),
        ("lm_head.weight", 0),
        ("model.embed_tokens.weight", 0),
    ],
)
def test_the_parts_side_by_side_are_the_tensor(checkpoint: Checkpoint, size: int, name: str, dim: int) -> None:
    assert torch.equal(torch.cat(parts(checkpoint, name, size), dim), whole(checkpoint, name))


def test_norms_are_whole_everywhere(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.input_layernorm.weight"
    assert all(torch.equal(part, whole(checkpoint, name)) for part in parts(checkpoint, name, 4))


def test_kv_heads_are_shared_out_and_then_copied(checkpoint: Checkpoint) -> None:
    name = ATTN + "k_proj.weight"
    first, second = whole(checkpoint, name).chunk(2)
    assert torch.equal(torch.cat(parts(checkpoint, name, 2)), whole(checkpoint, name))
    four = parts(checkpoint, name, 4)
    assert all(torch.equal(four[rank], [first, first, second, second][rank]) for rank in range(4))


def test_replicated_queries_are_those_of_the_context_group(checkpoint: Checkpoint) -> None:
    name = ATTN + "q_proj.weight"
    halves = whole(checkpoint, name).chunk(2)
    for rank in range(4):
        shard = ModelShard(checkpoint.config, rank, 4, ContextShard(rank % 2, 2), q_replicate=True)
        out = torch.empty(ShardedCheckpoint(checkpoint, shard).shape(name))
        ShardedCheckpoint(checkpoint, shard).read(name, out)
        assert torch.equal(out, halves[rank // 2])
        assert shard.config.num_attention_heads == 2, "what it projects back are its own heads"


def test_zero_heads_fill_up_each_group(tmp_path: Path) -> None:
    """3 query heads a KV head become 4: the fourth has no weights."""
    path = tiny_llama_dir(tmp_path, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8)
    with open_checkpoint(str(path)) as checkpoint:
        q = torch.cat(parts(checkpoint, ATTN + "q_proj.weight", 6, heads=12)).view(3, 4, 8, -1)
        o = torch.cat(parts(checkpoint, ATTN + "o_proj.weight", 6, heads=12), 1).view(-1, 3, 4, 8)
        assert torch.equal(q[:, :3].flatten(0, 2), whole(checkpoint, ATTN + "q_proj.weight"))
        assert torch.equal(o[:, :, :3].flatten(1), whole(checkpoint, ATTN + "o_proj.weight"))
        assert not q[:, 3].any()
        assert not o[:, :, 3].any()


def test_what_comes_out_uneven_is_filled_with_zeros(tmp_path: Path) -> None:
    path = tiny_llama_dir(tmp_path, num_attention_heads=4, intermediate_size=10, vocab_size=321)
    with open_checkpoint(str(path)) as checkpoint:
        for name, dim in [(MLP + "gate_proj.weight", 0), (MLP + "down_proj.weight", 1), ("lm_head.weight", 0)]:
            tensor = whole(checkpoint, name)
            joined = torch.cat(parts(checkpoint, name, 4), dim)
            found, rest = joined.split((tensor.shape[dim], joined.shape[dim] - tensor.shape[dim]), dim)
            assert torch.equal(found, tensor)
            assert not rest.any()
        assert ModelShard(checkpoint.config, 0, 4).config.vocab_size == 81


def test_only_the_part_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of four asks the file for a quarter of a matrix."""
    from mini_engine import safetensors_dir

    asked: list[tuple[slice, slice] | None] = []
    load = safetensors_dir.SafetensorsCheckpoint._load

    def watched(self, name, part=None):
        asked.append(part)
        return load(self, name, part)

    monkeypatch.setattr(safetensors_dir.SafetensorsCheckpoint, "_load", watched)
    with open_checkpoint(str(directory)) as checkpoint:
        parts(checkpoint, MLP + "down_proj.weight", 4)
    assert asked == [(slice(0, 96), slice(32 * rank, 32 * rank + 32)) for rank in range(4)]


@pytest.mark.parametrize("build", [tiny_llama_dir, tiny_qwen3_dir])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bytes_of_a_rank_are_the_analysis(tmp_path: Path, build, size: int) -> None:
    from mini_engine.groups import LocalGroup, run_ranks
    from mini_engine.runner import ModelRunner

    path = build(tmp_path, num_attention_heads=8, num_key_value_heads=2, dtype=torch.float32)
    config = EngineConfig(str(path), tensor_parallel_size=size, block_size=4, num_gpu_blocks_override=10)
    with open_checkpoint(str(path)) as checkpoint:
        ranks = run_ranks(LocalGroup.create(size), lambda group: ModelRunner(config, checkpoint, group))
        model = checkpoint.config
    for rank in ranks:
        assert rank.weight_bytes == weight_bytes_per_card(model, size)
        assert rank.kv.bytes_per_token == kv_bytes_per_token_per_card(model, size)
        assert rank.kv.nbytes == 10 * 4 * rank.kv.bytes_per_token


SMOLLM2 = ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size 2 must divide the 9 query heads. What works: 1, 3, 9"),
        ({"tensor_parallel_size": 6}, r"6 must divide the 9 query heads.* or num_padded_query_heads 12$"),
        ({"tensor_parallel_size": 6, "decode_context_parallel_size": 2}, r"6 must divide .*num_padded_query_heads 12$"),
        ({"tensor_parallel_size": 4, "num_padded_query_heads": 12}, r"4 and the 3 KV heads must divide one another"),
        ({"num_padded_query_heads": 10}, r"10 must be a multiple of the 3 KV heads and at least the model's 9"),
        ({"num_padded_query_heads": 6}, r"6 must be a multiple of the 3 KV heads and at least the model's 9"),
        (
            {"tensor_parallel_size": 3, "decode_context_parallel_size": 3},
            r"at tensor_parallel_size 3 the 3 KV heads have no copies",
        ),
        (
            {"tensor_parallel_size": 12, "num_padded_query_heads": 12, "decode_context_parallel_size": 3},
            r"must divide the 4 copies of each KV head .* at tensor_parallel_size 12: 1, 2, 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelShard.of(EngineConfig(**settings), SMOLLM2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size 2 must divide tensor_parallel_size 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number of at least 1, got 0"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "cp_kv_cache_interleave_size": 3},
            "cp_kv_cache_interleave_size 3 must divide block_size 16.* use one of 1, 2, 4, 8, 16",
        ),
        ({"dcp_comm_backend": "nccl"}, "dcp_comm_backend must be one of ag_rs, a2a, got 'nccl'"),
        ({"dcp_q_replicate": "yes"}, "dcp_q_replicate must be True or False, got 'yes'"),
        ({"distributed_executor_backend": "ray"}, "must be one of auto, local, mp, external_launcher, got 'ray'"),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, "async_scheduling works on one rank only so far"),
        ({"tensor_parallel_size": 2, "host_cache_bytes": 1 << 20}, "host_cache_bytes works on one rank only so far"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_widths_of_experts_are_rounded_up(tmp_path: Path) -> None:
    path = tiny_deepseek_v2_dir(tmp_path, num_attention_heads=8, moe_intermediate_size=20)
    with open_checkpoint(str(path)) as checkpoint:
        moe = ModelShard(checkpoint.config, 0, 8).config.moe
        assert moe is not None
        assert moe.moe_intermediate_size == 3


def test_a_part_is_read_whole_and_into_its_shape(directory: Path) -> None:
    name = MLP + "down_proj.weight"
    with open_checkpoint(str(directory)) as checkpoint:
        part = ShardedCheckpoint(checkpoint, ModelShard(checkpoint.config, 0, 4))
        with pytest.raises(ModelLoadError, match="a rank's part is read whole"):
            part.read(name, torch.empty(part.shape(name)), rows=range(2))
        with pytest.raises(ModelLoadError, match="has shape"):
            part.read(name, torch.empty(checkpoint.shape(name)))


def test_logits_are_those_of_the_vocabulary_and_int4_is_left(tmp_path: Path) -> None:
    """A vocabulary that 4 ranks cannot share evenly, and a file whose 4-bit groups a cut would go through."""
    from mini_engine import LLM, SamplingParams

    path = to_gguf(tiny_llama_dir(tmp_path, vocab_size=321), tmp_path / "tiny.gguf", "Q4_0")
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=8, logprobs=400)
    ranks: dict[str, Any] = {"tensor_parallel_size": 4, "distributed_executor_backend": "local"}
    output = LLM(str(path), **ranks).generate(prompt, params)[0].outputs[0]
    assert output.token_ids == LLM(str(path), dtype="float32").generate(prompt, params)[0].outputs[0].token_ids
    assert output.logprobs is not None
    assert all(len(each) == 321 for each in output.logprobs)


def test_ranks_take_the_least_of_their_rooms(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mini_engine import sizing
    from mini_engine.groups import LocalGroup, run_ranks
    from mini_engine.runner import ModelRunner

    rooms = iter([9, 7, 8, 9])
    monkeypatch.setattr(sizing, "num_kv_blocks", lambda *args: next(rooms))
    config = EngineConfig(str(directory), tensor_parallel_size=4)
    with open_checkpoint(str(directory)) as checkpoint:
        ranks = run_ranks(LocalGroup.create(4), lambda group: ModelRunner(config, checkpoint, group))
    assert [rank.num_blocks for rank in ranks] == [7] * 4
