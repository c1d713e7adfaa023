"""How a model stretches its rotary embedding to more positions than it was first trained on: llama3 or yarn.

Never imports torch; `rotary.py` computes the frequencies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mini_engine.errors import ModelLoadError


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The frequency scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, a ramp between.

    Source: `rope_scaling` of Llama 3.1's config.json, `rope_type: llama3`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ModelLoadError(
                f"rope scaling llama3 needs factor >= 1 and 0 < low_freq_factor < high_freq_factor, got factor "
                f"{self.factor}, low {self.low_freq_factor}, high {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN as DeepSeek-V2 uses it: pairs that turn less than `beta_slow` times within the original context have their
    frequency divided by `factor`, those above `beta_fast` turns keep it, a ramp over the pairs between.

    Longer contexts have flatter softmaxes, which two temperatures answer: cosine and sine are multiplied by
    `attention_factor`, and DeepSeek's softmax scale by `scale_factor`.
    mscale, mscale_all_dim: weights of the logarithm in them; mscale_all_dim 0 leaves the softmax scale alone.

    Source: Peng et al. 2023 (YaRN); `rope_scaling` of DeepSeek-V2's config.json, `type: yarn`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1
    mscale_all_dim: float = 0

    def __post_init__(self) -> None:
        if not (1 <= self.factor < math.inf and 0 < self.beta_slow < self.beta_fast):
            raise ModelLoadError(
                f"rope scaling yarn needs factor >= 1 and 0 < beta_slow < beta_fast, got factor {self.factor}, "
                f"beta_slow {self.beta_slow}, beta_fast {self.beta_fast}"
            )
        if not self.original_max_position_embeddings > 0:
            raise ModelLoadError(
                f"rope scaling yarn needs original_max_position_embeddings above 0, got "
                f"{self.original_max_position_embeddings}"
            )
        # Without both, DeepSeek's own code and transformers compute different cosines from the same file.
        if not (self.mscale > 0 and self.mscale_all_dim >= 0) or (self.mscale_all_dim == 0 and self.mscale != 1):
            raise ModelLoadError(
                f"rope scaling yarn needs mscale and mscale_all_dim above 0, or neither of them, got mscale "
                f"{self.mscale} and mscale_all_dim {self.mscale_all_dim}"
            )

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def scale_factor(self) -> float:
        """What DeepSeek multiplies 1 / sqrt(width of a query head) by: a temperature for queries, one for keys."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


RopeScaling = Llama3RopeScaling | YarnRopeScaling
KINDS: dict[str, type[Llama3RopeScaling] | type[YarnRopeScaling]] = {
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
}
# Settings of yarn beside its fields, and the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_factor": (None,),
    "truncate": (None, True),
    "partial_rotary_factor": (None, 1),
}


def read_rope(config: Mapping[str, Any], kind_supported: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a config.json. transformers 5 keeps both in `rope_parameters`, 4 beside each other.

    kind_supported: the one scaling that the model's architecture is computed with. Raises ModelLoadError for others.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != kind_supported:
        raise ModelLoadError(f"rope scaling {kind!r} is not supported, only 'default' and {kind_supported!r}")
    fields = dataclasses.fields(KINDS[kind])
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    if any(rope.get(name) is None for name in required):
        raise ModelLoadError(f"rope scaling {kind} needs {', '.join(required)}; config.json has {sorted(rope)}")
    if kind == "yarn":
        _refuse_ignored(rope)
    given = {field.name: rope[field.name] for field in fields if rope.get(field.name) is not None}
    return theta, KINDS[kind](**given)


def _refuse_ignored(rope: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if rope.get(name) not in neutral:
            raise ModelLoadError(f"rope scaling yarn sets {name} to {rope[name]!r}, which this engine does not compute")
    if rope.get("mscale_all_dim") and rope.get("mscale") is None:
        raise ModelLoadError("rope scaling yarn sets mscale_all_dim without mscale: give both, or neither of them")
