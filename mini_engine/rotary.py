"""The angles of rotary position embedding, with a model's scaling to longer contexts.

    pair i of the rotated width D turns by     theta^(-2i/D) radians per position

Source: Su et al. 2021; Llama 3.1's reference code for its scaling; Peng et al. 2023 for YaRN.
"""

from __future__ import annotations

import math

import torch

from mini_engine.config import ModelConfig
from mini_engine.rope_scaling import Llama3RopeScaling, YarnRopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each of the rotary_dim / 2 pairs, scaled. float32."""
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_factors is not None:
        return frequency / torch.tensor(config.rope_factors)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if isinstance(scaling, YarnRopeScaling):
        kept = _yarn_kept(scaling, config.rope_theta, config.rotary_dim)
    else:
        kept = _llama3_kept(scaling, frequency)
    return frequency * (kept + (1 - kept) / scaling.factor)


def _llama3_kept(scaling: Llama3RopeScaling, frequency: torch.Tensor) -> torch.Tensor:
    """How much of each frequency stays undivided, 0 to 1: a ramp over the turns within the original context."""
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return ramp.clamp(0, 1)


def _yarn_kept(scaling: YarnRopeScaling, theta: float, dim: int) -> torch.Tensor:
    """The same for YaRN: a ramp over the index of the pair, between the pairs that turn beta_fast and beta_slow times,
    rounded outwards."""

    def pair_that_turns(times: float) -> float:
        context = scaling.original_max_position_embeddings
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), dim - 1)
    width = last - first if last != first else 0.001  # as in the published code: a step
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / width
    return 1 - ramp.clamp(0, 1)


def rotary_table(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[length, 2, D]: the cosine, and the sine with its first half negated, of every position."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    if isinstance(config.rope_scaling, YarnRopeScaling):
        table *= config.rope_scaling.attention_factor
    return table.to(dtype).to(device)
