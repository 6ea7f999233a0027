"""FastKernels: drop-in optimized modules for production inference engines, and a patcher that puts them there.

`import fastkernels` imports no kernel and no host; attributes are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "patch": ".patch",
    "patch_async": ".patch",
    "Report": ".patch",
    "LLM": ".engine.llm",
    "AsyncLLM": ".engine.async_llm",
    "EngineConfig": ".engine.config",
    "SamplingParams": ".engine.sampling_params",
}
__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from .engine.async_llm import AsyncLLM
    from .engine.config import EngineConfig
    from .engine.llm import LLM
    from .engine.sampling_params import SamplingParams
    from .patch import Report, patch, patch_async


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module 'fastkernels' has no attribute {name!r}")
