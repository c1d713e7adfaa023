"""How long a step takes: the one thing the virtual clock has to be told.

A cost model is a function from a step's work to seconds:

    fitted_cost(step)   base + tokens and pairs at the prices of `analysis.FittedStep`, such as the book's BOOK_STEP
    RooflineCost        max(FLOPs / reached FLOP/s, bytes / reached B/s), from a data sheet and two efficiencies

`fit.py` makes a FittedStep of a measured run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mini_engine.analysis import (
    FittedStep,
    Hardware,
    NumberFormat,
    causal_pairs,
    flops_per_pair,
    kv_bytes_per_token,
    linear_flops_per_token,
    lm_head_flops,
    padded_rows,
    weight_read_bytes,
)
from mini_engine.config import ModelConfig
from mini_engine.errors import ConfigError
from mini_engine.scheduler import SchedulerOutput


class StepWork(NamedTuple):
    """What one step computes and reads.

    num_tokens: new tokens. num_pairs: causal query-key pairs. num_context_tokens: tokens whose K and V are read, each
    once per sequence, the new ones among them. num_sampled: rows whose logits are wanted.
    """

    num_tokens: int
    num_pairs: int
    num_context_tokens: int
    num_sampled: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> StepWork:
        tokens = pairs = context = 0
        for _, start, num_tokens in output.scheduled:
            end = start + num_tokens
            tokens += num_tokens
            pairs += causal_pairs(num_tokens, start) if num_tokens > 1 else end
            context += end
        return cls(tokens, pairs, context, len(output.sampled))


CostModel = Callable[[StepWork], float]


def fitted_cost(step: FittedStep) -> CostModel:
    """The price of a step by a fitted line, from the totals of its work: `step.seconds` without a list of chunks."""

    def seconds(work: StepWork) -> float:
        rows = padded_rows(work.num_tokens, step.shapes) if step.shapes else work.num_tokens
        return step.base_s + rows * step.per_token_s + work.num_pairs * step.per_pair_s

    return seconds


@dataclass(frozen=True)
class RooflineCost:
    """The later of two finishes, all FLOPs at `mfu` of the peak and all reads at `mbu` of it, plus `overhead_s`.

    overhead_s: seconds a step beside the card's work, such as launches and the host. weights, kv: formats they are
    stored in; None is the model's own. Reads are the weights once, and the K and V of each sequence.
    Efficiencies are measured at one batch and context and only lent to others. Source: book 8.2.1.
    """

    model: ModelConfig
    hardware: Hardware
    mfu: float = 1.0
    mbu: float = 1.0
    overhead_s: float = 0.0
    weights: NumberFormat | None = None
    kv: NumberFormat | None = None

    def __post_init__(self) -> None:
        if not (0 < self.mfu <= 1 and 0 < self.mbu <= 1 and self.overhead_s >= 0):
            raise ConfigError(
                f"mfu and mbu are fractions of the peak in (0, 1] and the overhead at least 0 s, got {self.mfu}, "
                f"{self.mbu} and {self.overhead_s} s"
            )

    def flops(self, work: StepWork) -> float:
        """Operations of the step: layers for every token, attention for every pair, LM head for every sampled row."""
        token, pair, row = self._flops
        return token * work.num_tokens + pair * work.num_pairs + row * work.num_sampled

    def read_bytes(self, work: StepWork) -> float:
        """Bytes the step reads."""
        weights, kv = self._bytes
        return weights + kv * work.num_context_tokens

    def __call__(self, work: StepWork) -> float:
        compute = self.flops(work) / (self.mfu * self.hardware.peak(self.model.dtype))
        memory = self.read_bytes(work) / (self.mbu * self.hardware.bandwidth)
        return max(compute, memory) + self.overhead_s

    @cached_property
    def _flops(self) -> tuple[int, int, int]:
        return linear_flops_per_token(self.model), flops_per_pair(self.model), lm_head_flops(self.model)

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        return weight_read_bytes(self.model, self.weights), kv_bytes_per_token(self.model, self.kv)
