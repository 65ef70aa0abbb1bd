"""CyberSLM: build a small decoder-only language model from your own text.

    import cyberslm
    engine = cyberslm.load("runs/demo/final")
    print(engine.generate("CWE-79:", temperature=0.8, seed=1)[0].text)

Names are loaded when first used, so that ``import cyberslm`` costs nothing and does nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyberslm.decoding.sampling import SamplingParams
    from cyberslm.errors import CyberSLMError
    from cyberslm.generation.engine import Completion, Engine, TokenEvent
    from cyberslm.model.attention import Attention, MultiHeadSelfAttention
    from cyberslm.model.cache import KVCache
    from cyberslm.model.config import CyberSLMConfig, RopeScaling
    from cyberslm.model.model import CyberSLM
    from cyberslm.recipes.use import load

_HOME = {
    "Attention": "model.attention",
    "Completion": "generation.engine",
    "CyberSLM": "model.model",
    "CyberSLMConfig": "model.config",
    "CyberSLMError": "errors",
    "Engine": "generation.engine",
    "KVCache": "model.cache",
    "MultiHeadSelfAttention": "model.attention",
    "RopeScaling": "model.config",
    "SamplingParams": "decoding.sampling",
    "TokenEvent": "generation.engine",
    "load": "recipes.use",
}

__all__ = [
    "Attention",
    "Completion",
    "CyberSLM",
    "CyberSLMConfig",
    "CyberSLMError",
    "Engine",
    "KVCache",
    "MultiHeadSelfAttention",
    "RopeScaling",
    "SamplingParams",
    "TokenEvent",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'cyberslm' has no attribute {name!r}")
    return getattr(import_module(f"cyberslm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
