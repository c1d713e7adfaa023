"""What a kept prefix saves, and what it costs to have kept it (book 8.3.4).

    V_h = p_h · (T_r − T_f) − T_m

p_h chance of reuse, T_r recompute, T_f fetch, T_m upkeep: here one transfer out to the host, as long as the fetch back.
Left unsaid there: at most one reuse is counted, the link runs at its nominal rate and is never busy, there is one host
cache, and T_m is paid whether the prefix is used again or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_engine.analysis.flops import forward_flops
from mini_engine.analysis.formats import NumberFormat
from mini_engine.analysis.hardware import Hardware, Link
from mini_engine.analysis.inputs import AnalysisError, not_negative, whole
from mini_engine.analysis.memory import kv_bytes
from mini_engine.analysis.units import MiB
from mini_engine.config import ModelConfig

BOOK_PREFILL_MFU = 0.622
"""Share of the BF16 peak a prefill of 2048 tokens reached alone, experiment 8-1. The book prints 62 % and computes
with 0.622: 0.62 makes 308.9 ms of its 307.9 ms. Lent to other lengths, though attention's share grows with them."""


def recompute_seconds(
    model: ModelConfig, hardware: Hardware, new: int, history: int = 0, mfu: float = BOOK_PREFILL_MFU
) -> float:
    """Seconds to compute the KV of `new` tokens after `history` cached ones, T_r.

    Without the LM head: a cached prefix yields no logits. Grows faster than the length: 6144 tokens take 3.25 times as
    long as 2048. Raises AnalysisError for an mfu outside (0, 1].
    """
    if not 0 < mfu <= 1:
        raise AnalysisError(f"mfu is a share of the peak in (0, 1], got {mfu!r}")
    return forward_flops(model, new, history, logit_rows=0) / (mfu * hardware.peak(model.dtype))


@dataclass(frozen=True)
class KeptPrefix:
    """One prefix that might be kept. Times in seconds.

    reuse_probability: p_h. recompute_s: T_r. fetch_s: T_f. upkeep_s: T_m.
    """

    name: str
    num_bytes: int
    reuse_probability: float
    recompute_s: float
    fetch_s: float
    upkeep_s: float

    def __post_init__(self) -> None:
        whole(1, num_bytes=self.num_bytes)
        not_negative(recompute_s=self.recompute_s, fetch_s=self.fetch_s, upkeep_s=self.upkeep_s)
        if not 0 <= self.reuse_probability <= 1:
            raise AnalysisError(f"{self.name}: reuse_probability must lie in [0, 1], got {self.reuse_probability!r}")

    @property
    def hit_saving_s(self) -> float:
        """Seconds one reuse saves, T_r − T_f. Negative where fetching takes longer than computing: then recompute."""
        return self.recompute_s - self.fetch_s

    @property
    def value_s(self) -> float:
        """Expected seconds saved, V_h."""
        return self.reuse_probability * self.hit_saving_s - self.upkeep_s

    @property
    def value_s_per_mib(self) -> float:
        """Expected seconds saved for each MiB it takes: compares prefixes of different sizes."""
        return self.value_s * MiB / self.num_bytes

    @property
    def threshold(self) -> float | None:
        """Least p_h from which keeping it saves time, T_m / (T_r − T_f). None where no reuse would."""
        return self.probability_worth(0.0)

    def probability_worth(self, value_s: float) -> float | None:
        """The p_h at which V_h is `value_s`, such as that of what else fits the space. None where none up to 1 is."""
        if self.hit_saving_s <= 0:
            return None
        probability = (value_s + self.upkeep_s) / self.hit_saving_s
        return probability if 0 <= probability <= 1 else None


def kept_prefix(
    name: str,
    model: ModelConfig,
    hardware: Hardware,
    link: Link,
    tokens: int,
    reuse_probability: float,
    mfu: float = BOOK_PREFILL_MFU,
    kv: NumberFormat | None = None,
) -> KeptPrefix:
    """A prefix of `tokens` tokens swapped out over `link`: T_r from operations, T_f and T_m from bytes (book 8.3.4)."""
    whole(1, tokens=tokens)
    size = kv_bytes(model, tokens, kv)
    transfer = link.seconds(size)
    return KeptPrefix(
        name, size, reuse_probability, recompute_seconds(model, hardware, tokens, mfu=mfu), transfer, transfer
    )
