"""YaRN as DeepSeek-V2 uses it, against transformers and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mini_engine.errors import ModelLoadError
from mini_engine.mla import softmax_scale
from mini_engine.model_config import ModelConfig, YarnRopeScaling
from mini_engine.rotary import inverse_frequencies, rotary_table
from tests.builders import YARN_SCALING
from tests.deepseek_v2 import V2_LITE, transformers_4_to_5

YARNS = [
    V2_LITE["rope_scaling"],
    YARN_SCALING,
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},  # no mscale: cosines alone
    {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 9, "beta_slow": 0.5,
     "mscale": 1.0, "mscale_all_dim": 0.3},
    {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(YARNS)))
def test_yarn_equals_transformers(number: int) -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding

    published = {**V2_LITE, "rope_scaling": YARNS[number]}
    peer = transformers_4_to_5(published)
    config = ModelConfig.from_hf(published)
    positions = torch.arange(300)
    expected = DeepseekV2RotaryEmbedding(peer)(torch.zeros(1), positions[None])[0]  # complex, the factor in it
    cos, sin = rotary_table(config, 300, torch.float32, torch.device("cpu")).unbind(1)
    torch.testing.assert_close(torch.complex(cos[:, :32], sin[:, 32:]), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(cos[:, :32], cos[:, 32:]) and torch.equal(sin[:, :32], -sin[:, 32:])
    assert config.mla is not None
    assert softmax_scale(config, config.mla) == pytest.approx(DeepseekV2Attention(peer, 0).scaling, rel=1e-12)


def test_yarn_of_v2_lite_by_hand() -> None:
    """Factor 40: 0.1 · 0.707 · ln 40 + 1 = 1.2608; scale 192^-½ · 1.2608² = 0.1147. Pairs up to 10 keep their
    frequency, those from 23 on turn 40 times slower."""
    config = ModelConfig.from_hf(V2_LITE)
    assert config.mla is not None and isinstance(config.rope_scaling, YarnRopeScaling)
    assert softmax_scale(config, config.mla) == pytest.approx(0.1147, abs=5e-5)
    assert config.rope_scaling.attention_factor == 1
    plain = 10_000 ** -(torch.arange(32, dtype=torch.float64) / 32)
    kept = plain / inverse_frequencies(config).double()
    assert kept[:11].tolist() == pytest.approx([1.0] * 11) and kept[23:].tolist() == pytest.approx([40.0] * 9)
    assert all(1 < ratio < 40 for ratio in kept[11:23].tolist())


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"factor": 0.5}, "factor >= 1 .*got factor 0.5"),
        ({"factor": math.nan}, "got factor nan"),
        ({"beta_slow": 32}, "beta_slow < beta_fast, got factor 40, beta_slow 32, beta_fast 32"),
        ({"beta_slow": -1}, "0 < beta_slow"),
        ({"original_max_position_embeddings": -1}, "original_max_position_embeddings above 0, got -1"),
        ({"mscale_all_dim": 0}, "above 0, or neither of them, got mscale 0.707 and mscale_all_dim 0"),
        ({"mscale": 0}, "got mscale 0 and mscale_all_dim 0.707"),
        ({"mscale": None}, "mscale_all_dim without mscale: give both"),
        ({"attention_factor": 1.2}, "sets attention_factor to 1.2, which this engine does not compute"),
        ({"truncate": False}, "sets truncate to False"),
        ({"partial_rotary_factor": 0.5}, "sets partial_rotary_factor to 0.5"),
    ],
    ids=str,
)
def test_yarn_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        ModelConfig.from_hf({**V2_LITE, "rope_scaling": {**V2_LITE["rope_scaling"], **changes}})
