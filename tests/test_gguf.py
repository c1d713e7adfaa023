"""GGUF files against independent readers: the gguf package (values, header) and transformers (names, row order)."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mini_engine.config import ModelConfig
from mini_engine.errors import ModelLoadError
from mini_engine.gguf import TENSOR_TYPES, GGUFFile
from mini_engine.gguf_checkpoint import GGUFCheckpoint
from mini_engine.gguf_quants import dequantize
from mini_engine.safetensors_dir import SafetensorsCheckpoint
from mini_engine.weights import find_smollm2
from tests.builders import LLAMA3_SCALING, tiny_llama_dir, tiny_qwen3_dir, to_gguf

MODELS = ("tiny-llama", "tiny-qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tied Llama and an untied Qwen3, each as a directory and as an F32 GGUF file."""
    root = tmp_path_factory.mktemp("gguf")
    tiny_llama_dir(root, tie_word_embeddings=True)
    tiny_qwen3_dir(root)
    for name in MODELS:
        to_gguf(root / name, root / f"{name}.gguf")
    return root


def read_all(checkpoint: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in checkpoint.names():
        tensors[name] = torch.full(checkpoint.shape(name), torch.nan, dtype=dtype)
        checkpoint.read(name, tensors[name])
    return tensors


@pytest.mark.parametrize("type_name", [name for name, _, _ in TENSOR_TYPES.values()])
def test_dequantize_is_exact(type_name: str) -> None:
    """Every bit pattern of a block, not only those a quantiser makes; infinite scales aside."""
    _, block, block_bytes = next(entry for entry in TENSOR_TYPES.values() if entry[0] == type_name)
    raw = np.random.default_rng(0).integers(0, 256, (7, 3 * 32 // block * block_bytes), dtype=np.uint8)
    if block > 1:
        halves = raw.reshape(-1, block_bytes)[:, : 4 if type_name.endswith("_1") else 2]
        halves[:, 1::2] &= 0b10111111  # keeps float16 finite
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    actual = dequantize(torch.from_numpy(raw), type_name).float().numpy()
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_header_is_read_as_the_gguf_package_reads_it(models: Path, name: str) -> None:
    path = models / f"{name}.gguf"
    reader, ours = gguf.GGUFReader(path), GGUFFile(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: (info.shape, info.start, info.nbytes) for name, info in ours.tensors.items()} == {
        tensor.name: (tuple(tensor.shape.tolist()[::-1]), tensor.data_offset, tensor.n_bytes)
        for tensor in reader.tensors
    }
    ours.close()


@pytest.mark.parametrize("name", MODELS)
def test_f32_equals_the_safetensors_it_was_made_of(models: Path, name: str) -> None:
    with GGUFCheckpoint(models / f"{name}.gguf") as ours, SafetensorsCheckpoint(models / name) as original:
        assert ours.config == original.config
        expected = read_all(original)
        actual = read_all(ours)
        assert actual.keys() == expected.keys()
        for tensor in expected:
            torch.testing.assert_close(actual[tensor], expected[tensor], rtol=0, atol=0, msg=tensor)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "BF16"])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_equal_those_of_transformers(models: Path, tmp_path: Path, name: str, type_name: str) -> None:
    """transformers reads the file on its own: types, names, and the order of Q and K rows."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = to_gguf(models / name, tmp_path / "model.gguf", type_name)
    model = AutoModelForCausalLM.from_pretrained(models / name)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    with GGUFCheckpoint(path) as ours:
        actual = read_all(ours)
    assert actual.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(actual[tensor], expected[tensor].float(), rtol=0, atol=0, msg=tensor)


@pytest.mark.parametrize("chunk", [1, 100, 1500, 1 << 18])
def test_reading_in_slices_into_a_fused_tensor(models: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """K in the middle of a bfloat16 Q, K, V; the rows around it stay untouched, whatever the size of a slice."""
    monkeypatch.setattr("mini_engine.gguf_checkpoint._CHUNK_ELEMENTS", chunk)
    name = "model.layers.1.self_attn.k_proj.weight"
    with GGUFCheckpoint(models / "tiny-llama.gguf") as ours, SafetensorsCheckpoint(models / "tiny-llama") as original:
        config = ours.config
        fused = torch.zeros(config.q_size + 2 * config.kv_size, config.hidden_size, dtype=torch.bfloat16)
        ours.read(name, fused[config.q_size : config.q_size + config.kv_size])
        expected = torch.zeros_like(fused)
        original.read(name, expected[config.q_size : config.q_size + config.kv_size])
    assert torch.equal(fused, expected)


def test_llama3_scaling_arrives_as_factors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    directory = tiny_llama_dir(tmp_path, rope_scaling=LLAMA3_SCALING)
    with GGUFCheckpoint(to_gguf(directory, tmp_path / "model.gguf")) as checkpoint:
        config = checkpoint.config
        assert all("rope" not in name for name in checkpoint.names())
    assert config.rope_scaling is None and config.rope_factors is not None
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    scaled = config.rope_theta**-exponents / torch.tensor(config.rope_factors)
    expected = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(directory)).inv_freq
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)
    assert len(set(config.rope_factors)) > 3, "the case has to cover the ramp between the two regimes"


def test_smollm2() -> None:
    with GGUFCheckpoint(find_smollm2()) as checkpoint:
        assert checkpoint.config == ModelConfig(
            architecture="llama",
            num_hidden_layers=30,
            hidden_size=576,
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=49152,
            tie_word_embeddings=True,
            rope_theta=100_000.0,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
        )
        assert checkpoint.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>
        out = torch.empty(192, 576)
        checkpoint.read("model.layers.7.self_attn.v_proj.weight", out)
        info = checkpoint._file.tensors["blk.7.attn_v.weight"]
        raw = np.fromfile(find_smollm2(), np.uint8, info.nbytes, offset=info.start).reshape(192, -1)
        np.testing.assert_array_equal(out, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_that_were_read_do_not_stay_in_memory() -> None:
    path = find_smollm2()
    with GGUFCheckpoint(path) as checkpoint:
        name = "model.embed_tokens.weight"  # 30 MB in the file
        checkpoint.read(name, torch.empty(checkpoint.shape(name)))
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        assert any(line.endswith(str(path)) for line in lines)
        resident = int(next(line for line in lines if line.startswith("Rss:")).split()[1])  # kB
    assert resident < 8_000  # the header and its read-ahead


# What is refused: what an edit does to a good file, and what the one line must say.
def _set(key: str, value: Any) -> Callable[..., Any]:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def _drop(*keys: str) -> Callable[..., Any]:
    return lambda metadata, tensors: [part.pop(key, None) for key in keys for part in (metadata, tensors)]


def _tensor(name: str, *shape: int) -> Callable[..., Any]:
    return lambda metadata, tensors: tensors.__setitem__(name, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    "edit, message",
    [
        (_set("general.architecture", "gemma"), "architecture 'gemma' is not supported, only llama and qwen3"),
        (_drop("llama.block_count"), "the metadata lacks llama.block_count"),
        (_set("llama.block_count", 3), "model.layers.2.input_layernorm.weight, .* and 6 more are missing"),
        (_set("llama.block_count", 1), "model.layers.1.* not part of a llama with 1 layers"),
        (_set("llama.block_count", 2**32 - 1), "4294967295 layers in its config, but only 20 tensors"),
        (_set("llama.block_count", "two"), "block_count must be one positive whole number, got two"),
        (_set("llama.embedding_length", 128), r"has shape \[.*96\], its config asks for \[.*128\]"),
        (_set("llama.attention.head_count", 5), "5 query heads cannot be shared out evenly over 2"),
        (_set("llama.attention.head_count_kv", [1, 2]), r"head_count_kv must be one positive whole number, got \[1, 2"),
        (_set("llama.attention.value_length", 8), "attention.value_length is 8"),
        (_set("llama.rope.dimension_count", 8), "rope.dimension_count is 8"),
        (_set("llama.rope.scaling.type", "yarn"), "rope.scaling.type is 'yarn', which this engine does not compute"),
        (_set("llama.rope.freq_base", -1.0), "rope.freq_base must be one positive number, got -1.0"),
        (_set("llama.expert_count", 8), "expert_count is 8"),
        (_set("llama.attention.sliding_window", 64), "sliding_window is 64"),
        (_drop("blk.1.ffn_up.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (_drop("token_embd.weight"), "model.embed_tokens.weight is missing"),
        (_tensor("blk.0.attn_q.bias", 64), "self_attn.q_proj.bias is not part of a llama"),
        (_tensor("blk.0.ffn_up_exps.weight", 64), "blk.0.ffn_up_exps.weight is not part of a llama"),
        (_tensor("blk.0.ffn_up.weight", 96, 128), r"up_proj.weight has shape \[96, 128\], .* \[128, 96\]"),
        (_tensor("rope_freqs.weight", 4), r"rope_freqs.weight must be F32 \[8\], .* it is F32 \[4\]"),
        (_set("tokenizer.ggml.eos_token_id", 5000), "eos_token_id is 5000, the tokenizer has 320 tokens"),
        (_drop("tokenizer.ggml.tokens"), "no tokenizer"),
        (_set("tokenizer.ggml.tokens", 5), "no tokenizer"),
        (_set("llama.vocab_size", 321), r"embed_tokens.weight has shape \[320, 96\], its config asks for \[321, 96\]"),
    ],
)
def test_refusals(models: Path, tmp_path: Path, edit: Callable[..., Any], message: str) -> None:
    path = to_gguf(models / "tiny-llama", tmp_path / "bad.gguf", edit=edit)
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFCheckpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("type_id, name", [(12, "Q4_K"), (14, "Q6_K"), (20, "IQ4_NL"), (31, "number 31")])
def test_other_quantisations_are_refused_by_name(models: Path, tmp_path: Path, type_id: int, name: str) -> None:
    data = bytearray((models / "tiny-llama.gguf").read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)
    data[at : at + 4] = struct.pack("<I", type_id)
    with pytest.raises(ModelLoadError, match=f"blk.0.ffn_up.weight' has type {name}, .* Q4_1, .* can"):
        GGUFCheckpoint(write(tmp_path, data))


def write(directory: Path, data: bytes | bytearray) -> Path:
    path = directory / "bad.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "the file is empty"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "a big-endian file is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"{2**60} tensors need"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), f"{2**60} metadata entries need"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(32), f"a string of {2**62} bytes"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**61) + bytes(8), f"{2**61} strings need"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**61) + bytes(8), f"{2**61} array elements"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(8), "array of metadata type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(8), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"\xff", 4) + bytes(8), "not UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**40, 0, 0) + bytes(64),
            "bytes 64 to 4398046511168",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9) + bytes(64), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 0, 5) + bytes(64), "at offset 5"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 8, 2, 0) + bytes(64), r"Q4_0 has shape \(8,\)"),
    ],
)
def test_corrupt_headers(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFCheckpoint(write(tmp_path, data))
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="absent.gguf: cannot be read: No such file"):
        GGUFCheckpoint(tmp_path / "absent.gguf")


def test_a_file_cut_anywhere_is_refused(models: Path, tmp_path: Path) -> None:
    data = (models / "tiny-llama.gguf").read_bytes()
    header = data.index(b"output_norm.weight") + 60
    for length in [*range(0, header, 97), *range(header, len(data), len(data) // 10), len(data) - 1]:
        with pytest.raises(ModelLoadError, match="truncated|empty|not a GGUF"):
            GGUFCheckpoint(write(tmp_path, data[:length]))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
@example(flips=[(0.0, 0)])
def test_corrupt_bytes_never_raise_anything_else(models: Path, tmp_path: Path, flips: list[tuple[float, int]]) -> None:
    data = bytearray((models / "tiny-llama.gguf").read_bytes())
    header = data.index(b"output_norm.weight") + 60
    for place, value in flips:
        data[int(place * header)] = value
    try:
        with GGUFCheckpoint(write(tmp_path, data)) as checkpoint:
            checkpoint.tokenizer().encode("some text 12")
            read_all(checkpoint)
    except ModelLoadError as error:
        assert "bad.gguf" in str(error) and "\n" not in str(error)


def test_a_name_or_shape_that_is_not_there(models: Path) -> None:
    with GGUFCheckpoint(models / "tiny-llama.gguf") as checkpoint:
        with pytest.raises(ModelLoadError, match="there is no tensor lm_head.weight"):
            checkpoint.read("lm_head.weight", torch.empty(1))
        with pytest.raises(ModelLoadError, match=r"has shape \[96\], the tensor to read it into has \[95\]"):
            checkpoint.read("model.norm.weight", torch.empty(95))
