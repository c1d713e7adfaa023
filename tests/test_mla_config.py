"""DeepSeek-V2's config.json: what is read, what is refused, and the sizes that follow from the published ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.checkpoint import check_tensors, expected_shapes
from mini_engine.errors import ModelLoadError
from mini_engine.model_config import MLAShape, ModelConfig, MoEShape, YarnRopeScaling
from mini_engine.weights import open_checkpoint
from tests.builders import YARN_SCALING, tiny_deepseek_v2_dir
from tests.deepseek_v2 import V2, V2_LITE, transformers_4_to_5


def test_v2_lite_is_read() -> None:
    config = ModelConfig.from_hf(V2_LITE)
    assert config.mla == MLAShape(None, 512, 128, 64, 128)
    assert config.moe == MoEShape(64, 6, 1408, 2, 1)
    assert config.rope_scaling == YarnRopeScaling(40, 4096, 32, 1, 0.707, 0.707)
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (1, 192, 64)
    assert (config.q_size, config.kv_size, config.o_size) == (3072, 576, 2048)
    assert (config.cached_heads, config.cached_key_dim, config.cached_value_dim) == (1, 576, 0)
    assert (config.cached_value_view, config.num_moe_layers, config.dtype) == (512, 26, "bfloat16")
    assert [config.is_moe_layer(layer) for layer in (0, 1, 26)] == [False, True, True]
    assert not config.qk_norm


@pytest.mark.parametrize(
    "published, billions, activated",  # the model cards: 15.7B and 2.4B, 236B and 21B
    [pytest.param(V2_LITE, 15.7, 2.4, id="v2-lite"), pytest.param(V2, 236, 21, id="v2")],
)
def test_published_sizes(published: dict[str, Any], billions: float, activated: float) -> None:
    config = ModelConfig.from_hf(published)
    assert config.num_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert config.num_params_read / 1e9 == pytest.approx(activated, rel=0.025)
    assert sum(math.prod(shape) for shape in expected_shapes(config).values()) == config.num_params
    assert config == ModelConfig.from_hf(
        {**transformers_4_to_5(published).to_dict(), "architectures": published["architectures"]}
    )


def test_v2_lite_is_as_large_as_transformers_makes_it() -> None:
    from transformers import DeepseekV2ForCausalLM

    with torch.device("meta"):
        peer: Any = DeepseekV2ForCausalLM(transformers_4_to_5(V2_LITE))
    config = ModelConfig.from_hf(V2_LITE)
    assert config.num_params == peer.num_parameters() == 15_706_484_224
    dense = sum(weight.numel() for weight in peer.model.layers[0].parameters())
    assert (config.layer_params, config.embedding_params) == (dense, peer.get_input_embeddings().weight.numel())
    assert config.weight_bytes() == 2 * config.num_params


def test_kv_bytes_per_token() -> None:
    """DeepSeek-V2's table 1: (d_c + d_h^R) elements a layer, 4.5 d_h; of DeepSeek-V2-Lite 27 · 576 in bfloat16."""
    assert ModelConfig.from_hf(V2_LITE).kv_bytes_per_token() == 27 * 576 * 2
    assert ModelConfig.from_hf(V2).kv_bytes_per_token("float32") == 60 * 576 * 4


@pytest.mark.parametrize(
    "name, shape",
    [  # as in the published files
        ("model.embed_tokens.weight", (102400, 2048)),
        ("lm_head.weight", (102400, 2048)),
        ("model.layers.0.self_attn.q_proj.weight", (3072, 2048)),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 2048)),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", (512,)),
        ("model.layers.26.self_attn.kv_b_proj.weight", (4096, 512)),
        ("model.layers.26.self_attn.o_proj.weight", (2048, 2048)),
        ("model.layers.0.mlp.gate_proj.weight", (10944, 2048)),
        ("model.layers.1.mlp.gate.weight", (64, 2048)),
        ("model.layers.1.mlp.experts.63.down_proj.weight", (2048, 1408)),
        ("model.layers.26.mlp.shared_experts.up_proj.weight", (2816, 2048)),
    ],
)
def test_v2_lite_tensors(name: str, shape: tuple[int, ...]) -> None:
    shapes = expected_shapes(ModelConfig.from_hf(V2_LITE))
    assert shapes[name] == shape
    assert len(shapes) == 3 + 27 * 7 + 3 + 26 * (1 + 3 * 64 + 3)


def test_queries_with_a_latent_of_their_own() -> None:
    shapes = expected_shapes(ModelConfig.from_hf(V2))
    prefix = "model.layers.5.self_attn."
    assert shapes[prefix + "q_a_proj.weight"] == (1536, 5120) and shapes[prefix + "q_a_layernorm.weight"] == (1536,)
    assert shapes[prefix + "q_b_proj.weight"] == (128 * 192, 1536) and prefix + "q_proj.weight" not in shapes


@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": 40, "max_shard_size": "60KB"}], ids=["one-file", "shards"])
def test_every_tensor_of_the_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    directory = tiny_deepseek_v2_dir(tmp_path, **overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = {name: weight.data for name, weight in model.named_parameters()}
    with open_checkpoint(str(directory)) as checkpoint:
        config = checkpoint.config
        found = {name: torch.full(checkpoint.shape(name), torch.nan) for name in checkpoint.names()}
        for name, tensor in found.items():
            checkpoint.read(name, tensor)
    assert config.num_params == sum(weight.numel() for weight in expected.values())
    assert found.keys() == expected_shapes(config).keys()
    for layer in (1, 2):  # transformers holds the experts stacked, files hold them one by one
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [[found.pop(f"{prefix}{i}.{part}_proj.weight") for i in range(8)] for part in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        found |= {prefix + "gate_up_proj": torch.cat((gate, up), dim=1), prefix + "down_proj": down}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"scoring_func": "sigmoid"}, "scoring_func to 'sigmoid', only 'softmax' is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq to 2, only 1 is supported"),
        ({"ep_size": 8}, "ep_size to 8, only 1 is supported"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok must be a positive integer, got None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
        ({"v_head_dim": "128"}, "v_head_dim must be a positive integer, got '128'"),
        ({"qk_rope_head_dim": 63}, "even qk_rope_head_dim, got 63"),
        ({"attention_bias": True}, "attention_bias, which this engine does not compute"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "'llama3' is not supported, only 'default' and 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 8}}, "yarn needs factor, original_max_position_embeddings; conf"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM is not supported"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says) as caught:
        ModelConfig.from_hf({**V2_LITE, **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["kv_lora_rank", "q_lora_rank", "v_head_dim", "moe_intermediate_size"])
def test_what_must_be_there(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json lacks '{name}', which a deepseek_v2 model needs"):
        ModelConfig.from_hf({key: value for key, value in V2_LITE.items() if key != name})


@pytest.mark.parametrize("changes", [{"head_dim": 64}, {"num_key_value_heads": 2}, {"mla": None}], ids=str)
def test_shapes_that_contradict_one_another(changes: dict[str, Any]) -> None:
    config = vars(ModelConfig.from_hf(V2_LITE))
    with pytest.raises(ModelLoadError, match="model config: "):
        ModelConfig(**{**config, **changes})


def test_a_count_of_experts_that_cannot_be_is_no_list_of_billions() -> None:
    config = ModelConfig.from_hf({**V2_LITE, "n_routed_experts": 10**12})
    with pytest.raises(ModelLoadError, match="1000000000000 experts in its config, but only 30 tensors"):
        check_tensors("file", config, {str(i): () for i in range(30)})


def test_models_without_experts_or_without_shared_ones(tmp_path: Path) -> None:
    dense = ModelConfig.from_hf({**V2_LITE, "n_routed_experts": None})
    assert dense.moe is None and dense.num_moe_layers == 0
    assert dense.num_params == sum(math.prod(shape) for shape in expected_shapes(dense).values())
    alone = ModelConfig.from_hf({**V2_LITE, "n_shared_experts": None})
    assert alone.num_params == sum(math.prod(shape) for shape in expected_shapes(alone).values())
    assert not any("shared" in name for name in expected_shapes(alone))
    late = ModelConfig.from_hf({**V2_LITE, "first_k_dense_replace": 40})
    assert late.num_moe_layers == 0 and late.num_params == dense.num_params


def test_json_round_trip_of_the_tiny_model(tmp_path: Path) -> None:
    """What transformers writes today is read like what DeepSeek published."""
    path = tiny_deepseek_v2_dir(tmp_path, rope_parameters=YARN_SCALING) / "config.json"
    new = json.loads(path.read_text())
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    scaling = {("type" if key == "rope_type" else key): value for key, value in YARN_SCALING.items()}
    theta = scaling.pop("rope_theta")
    old |= {"rope_scaling": scaling, "rope_theta": theta, "torch_dtype": "float32"}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


@pytest.mark.parametrize("shape", [MLAShape(None, 512, 128, 64, 128), MLAShape(None, 48, 16, 8, 12)], ids=str)
def test_break_even_of_the_two_forms(shape: MLAShape) -> None:
    """Operations counted product by product, heads and all; a long context decides."""
    heads, context = 16, 100_000

    def absorbed(new: int) -> int:
        query_key = new * context * heads * 2 * (shape.kv_lora_rank + shape.qk_rope_head_dim)
        return query_key + new * context * heads * 2 * shape.kv_lora_rank

    def naive(new: int) -> int:
        project = context * heads * 2 * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        query_key = new * context * heads * 2 * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        return project + query_key + new * context * heads * 2 * shape.v_head_dim

    first = next(new for new in range(1, 1000) if naive(new) < absorbed(new))
    assert first == math.floor(shape.naive_break_even) + 1
    assert first == {512: 171, 48: 20}[shape.kv_lora_rank]


def test_a_narrow_latent_is_never_projected() -> None:
    assert MLAShape(None, 16, 16, 8, 16).naive_break_even == math.inf
