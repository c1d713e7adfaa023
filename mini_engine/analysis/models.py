"""Shapes of public models, as the engine's own ModelConfig, so that one formula serves arithmetic and engine."""

from __future__ import annotations

from mini_engine.analysis.tables import entry, read_table
from mini_engine.config import Llama3RopeScaling, ModelConfig


def model_names() -> tuple[str, ...]:
    return tuple(read_table("models"))


def get_model(name: str) -> ModelConfig:
    """A model of the table. Raises AnalysisError with the names there are; any other model: `ModelConfig.from_hf`."""
    values = entry(read_table("models"), name, "model")
    del values["source"]
    if "rope_scaling" in values:
        values["rope_scaling"] = Llama3RopeScaling(**values["rope_scaling"])
    return ModelConfig(**values)


# The model of the book's measurements.
QWEN3_8B = get_model("qwen3-8b")
