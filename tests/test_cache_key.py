"""What must be equal, besides the tokens, before a request may use another's KV."""

from __future__ import annotations

import os

import pytest

from mini_engine import LLM, SamplingParams
from mini_engine.analysis.models import QWEN3_8B
from mini_engine.block_manager import BlockManager
from mini_engine.cache_key import CacheKey, file_revision, rope_rule
from mini_engine.model_config import Llama3RopeScaling, ModelConfig
from tests.builders import tiny_llama_dir
from tests.scheduling import sequence, unrelated

BASE = CacheKey("qwen3-8b rev1", "lora-a rev3", rope_rule(QWEN3_8B), "bfloat16", "tenant")
SCALING = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def hit(key: CacheKey, other: CacheKey) -> int:
    """Tokens that a request under `other` finds after the same one ran under `key`, in one pool."""
    blocks = BlockManager(32, 4)
    found = []
    for each in (key, other):
        blocks.cache_key = each
        seq = sequence("r", unrelated(0, 13))
        hits = blocks.match_prefix(seq)
        found.append(4 * len(hits))
        blocks.admit(seq, hits)
        seq.num_computed_tokens = 13
        blocks.cache_full_blocks(seq, len(hits), 3)
    return found[1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": "qwen3-8b rev2"}, id="revision"),
        pytest.param({"adapter": "lora-b rev3"}, id="adapter"),
        pytest.param({"adapter": None}, id="no adapter"),
        pytest.param({"position_rule": (1e4, None, None)}, id="position rule"),
        pytest.param({"kv_format": "float16"}, id="KV format"),
        pytest.param({"salt": "another tenant"}, id="salt"),
    ],
)
@pytest.mark.parametrize("collide", [False, True])
def test_equal_tokens_under_another_key_are_no_hit(change, collide, monkeypatch):
    """collide: all hashes are forced to be equal, and what they were made from still tells the prefixes apart."""
    assert hit(BASE, BASE) == 12
    if collide:
        monkeypatch.setattr("mini_engine.block_manager.hash_block", lambda parent, tokens: 7)
    assert hit(BASE, BASE._replace(**change)) == 0


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"rope_scaling": SCALING}, {"rope_factors": (2.0,) * (QWEN3_8B.head_dim // 2)}]
)
def test_the_position_rule_is_all_that_turns_a_key(change):
    other = ModelConfig(**{**vars(QWEN3_8B), **change})
    assert rope_rule(other) != rope_rule(QWEN3_8B)
    assert rope_rule(ModelConfig(**{**vars(QWEN3_8B), "vocab_size": 99})) == rope_rule(QWEN3_8B)


def test_a_revision_changes_when_a_file_does(tmp_path):
    file, same = tmp_path / "a.bin", tmp_path / "elsewhere" / "a.bin"
    same.parent.mkdir()
    for path in (file, same):
        path.write_bytes(b"12")
        os.utime(path, ns=(5, 5))
    first = file_revision([file])
    assert file_revision([file, file]) == first == file_revision([same])
    os.utime(file, ns=(5, 6))
    assert file_revision([file]) != first
    os.utime(same, ns=(5, 5))
    same.write_bytes(b"123")
    os.utime(same, ns=(5, 5))
    assert file_revision([same]) != first


def test_the_engine_names_what_it_computes_with(tmp_path):
    params = SamplingParams(max_tokens=1)
    keys = []
    for name, options in (("a", {}), ("b", {"rope_theta": 5e3}), ("a", {})):
        model = tiny_llama_dir(tmp_path, name, **options) if not (tmp_path / name).exists() else tmp_path / name
        for kv_dtype in ("float32", "bfloat16"):
            llm = LLM(str(model), dtype="float32", kv_cache_dtype=kv_dtype, num_gpu_blocks_override=9)
            llm.generate({"prompt_token_ids": [5] * 20}, params, cache_salt="mine")
            keys.append(llm.engine.scheduler.blocks.cache_key)
            roots = {block.parent_hash for block in llm.engine.scheduler.blocks.pool.cached.values()}
            assert roots == {keys[-1]._replace(salt="mine")}
    assert len(set(keys)) == 4 and keys[:2] == keys[4:]
    assert [key.kv_format for key in keys[:2]] == ["float32", "bfloat16"]
