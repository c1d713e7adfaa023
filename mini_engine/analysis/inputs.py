"""Refusal of inputs that have no answer: one line with the value and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral

from mini_engine.config import ModelConfig
from mini_engine.errors import EngineError


class AnalysisError(EngineError):
    """A question about a model, a card or a schedule that cannot be answered as it was put."""


def whole(minimum: int, **values: int) -> None:
    """Raise AnalysisError unless every value is a whole number (a numpy integer too) of at least `minimum`."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
            raise AnalysisError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def not_negative(**values: float) -> None:
    """Raise AnalysisError unless every value is a finite number of at least 0."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise AnalysisError(f"{name} must be a finite number of at least 0, got {value!r}")


def positive(**values: float) -> None:
    """Raise AnalysisError unless every value is a finite number above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise AnalysisError(f"{name} must be a finite number above 0, got {value!r}")


def dense(model: ModelConfig, question: str) -> None:
    """Raise AnalysisError for latent attention and experts, which the arithmetic behind `question` leaves out."""
    if model.mla or model.moe:
        raise AnalysisError(f"{question} is worked out for dense models with GQA, not for {model.architecture}")
