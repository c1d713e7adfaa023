"""What the configurations refuse, how they read Hugging Face's, and the figures they derive."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from mini_engine.config import EngineConfig, Llama3RopeScaling, ModelConfig, SchedulerConfig, dtype_bytes
from mini_engine.errors import ConfigError, EngineError, ModelLoadError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model(**changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "architecture": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    return ModelConfig(**{**shape, **changes})


def hf_config(kind: str = "Llama", **changes: Any) -> dict[str, Any]:
    """A config.json as transformers itself would write it."""
    import transformers

    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 100,
        "architectures": [f"{kind}ForCausalLM"],
    }
    return getattr(transformers, f"{kind}Config")(**{**shape, **changes}).to_dict()


def written_by_transformers_4(**changes: Any) -> dict[str, Any]:
    """The older spelling: theta beside rope_scaling, torch_dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        **changes,
    }


def assert_one_line(error: BaseException, says: str) -> None:
    assert re.search(says, str(error)), str(error)
    assert "\n" not in str(error) and isinstance(error, EngineError) and isinstance(error, ValueError)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported, only llama, qwen3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": -5}, "vocab_size must be a positive integer, got -5"),
        ({"hidden_size": 32.0}, "hidden_size must be a positive integer, got 32.0"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, got None"),
        ({"num_attention_heads": 5}, "5 query heads .* 2 KV heads"),
        ({"head_dim": 7}, "even head_dim, got 7"),
        ({"rope_factors": (1.0,) * 3}, "rope_factors must be 4 positive numbers.*head_dim 8, got 3"),
        ({"rope_factors": (1.0, 1.0, 1.0, 0.0)}, "rope_factors must be 4 positive numbers.*from 0.0 to 1.0"),
        ({"rope_factors": (1.0, 1.0, 1.0, math.nan)}, "rope_factors must be 4 positive"),
        ({"rope_factors": (1.0,) * 4, "rope_scaling": Llama3RopeScaling(8, 1, 4, 64)}, "exclude each other"),
    ],
    ids=str,
)
def test_model_refusals(changes, says):
    with pytest.raises(ModelLoadError) as caught:
        model(**changes)
    assert_one_line(caught.value, says)


@pytest.mark.parametrize("factors", [(0.5, 1, 4), (8, 0, 4), (8, 4, 4), (8, 4, 1), (8, -1, 4), (math.nan, 1, 4)])
def test_rope_scaling_refusals(factors):
    with pytest.raises(ModelLoadError) as caught:
        Llama3RopeScaling(*factors, original_max_position_embeddings=64)
    assert_one_line(caught.value, f"got factor {factors[0]}, low {factors[1]}, high {factors[2]}")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens .*at least 1, got 0"),
        ({"max_model_len": -1}, "max_model_len .*at least 1, got -1"),
        ({"block_size": 1.5}, "block_size .*at least 1, got 1.5"),
        ({"block_size": True}, "block_size .*got True"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold .*at least 0, got -1"),
        ({"num_blocks": 1}, "num_blocks must be at least 2 .*null block.*got 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority, got 'lifo'"),
        ({"batching": "none"}, "batching must be one of continuous, fixed, got 'none'"),
        ({"admission": None}, "admission must be one of preempt, reserve, got None"),
        ({"eviction_policy": "mru"}, "eviction_policy must be one of lru, fifo, lfu, value, got 'mru'"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 9}, "threshold 9 .*enable_chunked_prefill"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 99}, "99 is below max_model_len 2048; raise"),
    ],
    ids=str,
)
def test_scheduler_refusals(changes, says):
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**changes)
    assert_one_line(caught.value, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of .*got 'fp4'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"max_model_len": 0}, "max_model_len .*at least 1, got 0"),
        ({"kv_cache_memory_bytes": -4}, "kv_cache_memory_bytes .*at least 1, got -4"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override .*at least 2, got 1"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must lie in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must lie in \(0, 1\], got 1.1"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization .*got nan"),
    ],
    ids=str,
)
def test_engine_refusals(changes, says):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**changes)
    assert_one_line(caught.value, says)


def test_dtype_bytes():
    assert [dtype_bytes(name) for name in ("float32", "float16", "bfloat16")] == [4, 2, 2]
    with pytest.raises(ConfigError, match="'float8' is not one of float32, float16, bfloat16"):
        dtype_bytes("float8")


def test_the_scheduler_gets_every_setting_it_shares():
    """Each shared field with a value of its own, so that none can be left out or swapped."""
    engine = EngineConfig(
        block_size=3,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        long_prefill_token_threshold=11,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        batching="fixed",
        admission="reserve",
        eviction_policy="fifo",
        max_model_len=500,
    )
    expected = SchedulerConfig(5, 77, 11, True, False, "priority", "fixed", "reserve", 60, 3, 9, "fifo")
    assert engine.scheduler_config(max_model_len=60, num_blocks=9) == expected
    whole = EngineConfig(enable_chunked_prefill=False).scheduler_config(60, 9)
    assert whole == SchedulerConfig(enable_chunked_prefill=False, max_model_len=60, num_blocks=9)


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_what_the_engine_leaves_to_the_scheduler_is_checked_there(field):
    with pytest.raises(ConfigError, match=f"{field} .*got 0"):
        EngineConfig(**{field: 0}).scheduler_config(60, 9)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_from_transformers(kind, tied):
    config = ModelConfig.from_hf(
        hf_config(kind, tie_word_embeddings=tied, rms_norm_eps=1e-4, max_position_embeddings=77, dtype="float16")
    )
    assert config == ModelConfig(
        kind.lower(),  # type: ignore[arg-type]
        2, 32, 4, 2, 16, 64, 100, tied, max_position_embeddings=77, rms_norm_eps=1e-4, dtype="float16"
    )  # fmt: skip
    assert config.qk_norm == (kind == "Qwen3")


def test_what_the_older_spelling_leaves_out():
    config = ModelConfig.from_hf(written_by_transformers_4())
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 8, 500_000.0)
    assert (config.tie_word_embeddings, config.dtype, config.rope_scaling) == (False, "bfloat16", None)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: hf_config(rope_parameters={**LLAMA3, "rope_theta": 5e5}), id="transformers-5"),
        pytest.param(lambda: written_by_transformers_4(rope_scaling=LLAMA3), id="transformers-4"),
        pytest.param(
            lambda: written_by_transformers_4(
                rope_scaling={("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}
            ),
            id="oldest",
        ),
    ],
)
def test_llama3_scaling_in_every_spelling(config):
    read = ModelConfig.from_hf(config())
    assert read.rope_theta == 5e5
    assert read.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "scaling, says",
    [
        ({"rope_type": "linear", "factor": 2.0}, "rope scaling 'linear' is not supported"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope scaling 'dynamic' is not supported"),
        ({"type": "dynamic", "factor": 2.0}, "rope scaling 'dynamic' is not supported"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope scaling 'yarn' is not supported"),
        ({"rope_type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 needs factor, low_freq_factor.*config.json has"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor < high_freq_factor, got factor 8.0, low 1.0, high 1.0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_other_scaling_is_refused_not_ignored(spelling, scaling, says):
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_hf(written_by_transformers_4(**{spelling: scaling}))
    assert_one_line(caught.value, says)


@pytest.mark.parametrize(
    "config, says",
    [
        (lambda: hf_config("Mistral"), "architecture MistralForCausalLM is not supported.*LlamaForCausalLM and Qwen3"),
        (lambda: hf_config("Qwen2"), "architecture Qwen2ForCausalLM is not supported"),
        (lambda: hf_config(architectures=None), "architecture llama is not supported"),
        (lambda: {}, "architecture \\? is not supported"),
        (lambda: hf_config(attention_bias=True), "attention_bias"),
        (lambda: hf_config("Qwen3", attention_bias=True), "attention_bias"),
        (lambda: hf_config(mlp_bias=True), "mlp_bias"),
        (lambda: hf_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported, only 'silu'"),
        (lambda: hf_config(pretraining_tp=2), "pretraining_tp"),
        (lambda: hf_config("Qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding"),
        (
            lambda: {**hf_config("Qwen3"), "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window layers",
        ),
        (
            lambda: {**hf_config(), "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised by 'gptq' .*GGUF",
        ),
        (lambda: {k: v for k, v in hf_config().items() if k != "intermediate_size"}, "lacks 'intermediate_size'"),
        (lambda: {k: v for k, v in hf_config().items() if k != "num_attention_heads"}, "lacks 'num_attention_heads'"),
        (lambda: written_by_transformers_4(num_attention_heads=0), "num_attention_heads must be a positive integer"),
        (lambda: written_by_transformers_4(hidden_size="many"), "config.json has a value of the wrong kind: .*str"),
        (lambda: written_by_transformers_4(rope_scaling="linear"), "config.json has a value of the wrong kind: .*str"),
        (lambda: {**hf_config(), "hidden_size": "many"}, "hidden_size must be a positive integer, got 'many'"),
    ],
)
def test_from_hf_refusals(config, says):
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_hf(config())
    assert_one_line(caught.value, says)


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": False, "sliding_window": 4096}, {"layer_types": ["full_attention"] * 2}], ids=str
)
def test_settings_that_change_nothing_are_accepted(changes):
    assert ModelConfig.from_hf({**hf_config("Qwen3"), **changes}) == ModelConfig.from_hf(hf_config("Qwen3"))


# Published shapes of dense models: layers, hidden, heads, KV heads, head dim, feed-forward, vocabulary, tied.
SHAPES = {
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "llama-3.1-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama-3.1-70b": ("llama", 80, 8192, 64, 8, 128, 28672, 128256, False),
    "smollm2-135m": ("llama", 30, 576, 9, 3, 64, 1536, 49152, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_num_params_is_what_transformers_allocates(name):
    import torch
    import transformers

    config = ModelConfig(*SHAPES[name])  # type: ignore[arg-type]
    kind = {"llama": "Llama", "qwen3": "Qwen3"}[config.architecture]
    names = [field.name for field in dataclasses.fields(config)][1:9]
    settings = {field: getattr(config, field) for field in names}
    with torch.device("meta"):
        peer = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))
    assert config.num_params == peer.num_parameters()
    embedding = peer.get_input_embeddings().weight.numel()
    read = config.num_params if config.tie_word_embeddings else config.num_params - embedding
    assert config.num_params_read == read
    layer = sum(weight.numel() for weight in peer.model.layers[0].parameters())
    assert (config.layer_params, config.embedding_params) == (layer, embedding)


@pytest.mark.parametrize(
    "name, weights, read, kv",
    [  # bytes in bfloat16; the first row is the book's (8.1.2, 8.2.1), the others by hand from the published shapes
        ("qwen3-8b", 16_381_470_720, 15_136_811_008, 147_456),
        ("llama-3.1-8b", 16_060_522_496, 15_009_849_344, 131_072),
        ("llama-3.1-70b", 141_107_412_992, 139_006_066_688, 327_680),
        ("smollm2-135m", 269_030_016, 269_030_016, 23_040),
    ],
)
def test_bytes(name, weights, read, kv):
    config = ModelConfig(*SHAPES[name])  # type: ignore[arg-type]
    assert (config.weight_bytes(), config.weight_read_bytes(), config.kv_bytes_per_token()) == (weights, read, kv)
    assert config.weight_bytes("float32") == 2 * weights and config.kv_bytes_per_token("float32") == 2 * kv
    assert config.weight_read_bytes("float16") == read
    assert (config.q_size, config.kv_size) == (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
