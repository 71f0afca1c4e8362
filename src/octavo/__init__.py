"""Octavo: an LLM inference engine whose KV cache is virtual memory.

The names below are loaded on first use, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM as AsyncLLM
    from octavo.config import EngineConfig as EngineConfig
    from octavo.errors import ConfigError as ConfigError
    from octavo.errors import ModelError as ModelError
    from octavo.errors import OctavoError as OctavoError
    from octavo.errors import RequestError as RequestError
    from octavo.grammar import Grammar as Grammar
    from octavo.llm import LLM as LLM
    from octavo.outputs import Completion as Completion
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.params import BeamParams as BeamParams
    from octavo.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "EngineConfig": "config",
    "SamplingParams": "params",
    "BeamParams": "params",
    "Grammar": "grammar",
    "RequestOutput": "outputs",
    "Completion": "outputs",
    "OctavoError": "errors",
    "ModelError": "errors",
    "ConfigError": "errors",
    "RequestError": "errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(f"octavo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
