"""A small inference engine that serves a real model. See README.md; start at `llm.py` and follow the calls.

Names are loaded when first used, so that the scheduler, the arithmetic and the simulator never pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.config import EngineConfig, ModelConfig
    from mini_engine.engine import LLMEngine
    from mini_engine.errors import EngineError
    from mini_engine.llm import LLM
    from mini_engine.output_processor import CompletionOutput, RequestOutput
    from mini_engine.sequence import SamplingParams

_HOME = {
    "LLM": "llm",
    "LLMEngine": "engine",
    "EngineConfig": "config",
    "ModelConfig": "config",
    "EngineError": "errors",
    "SamplingParams": "sequence",
    "RequestOutput": "output_processor",
    "CompletionOutput": "output_processor",
}
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineError",
    "LLMEngine",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mini_engine' has no attribute {name!r}")
    return getattr(import_module(f"mini_engine.{_HOME[name]}"), name)
