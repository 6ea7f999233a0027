"""FastKernels: drop-in optimized modules for production inference engines, and a patcher that puts them there.

`import fastkernels` imports no kernel and no host; attributes are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "ActionParams": ".engine.scheduling.acting",
    "patch": ".patch",
    "patch_async": ".patch",
    "unpatch": ".patch",
    "unpatch_async": ".patch",
    "Report": ".patch",
    "plan": ".models.common.plans.plan",
    "AsyncLLM": ".engine.async_llm",
    "EngineConfig": ".engine.options.config",
    "FoldParams": ".engine.scheduling.folding",
    "FrameParams": ".engine.scheduling.rollout",
    "ImageParams": ".engine.scheduling.denoising",
    "VideoParams": ".engine.scheduling.denoising",
    "LLM": ".engine.llm",
    "RenderParams": ".engine.scheduling.rendering",
    "SpeechParams": ".engine.scheduling.speaking",
    "SamplingParams": ".engine.sampling.sampling_params",
    "StructuredOutputsParams": ".engine.structured.params",
    "UnmaskParams": ".engine.sampling.unmask_params",
}
__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from fastkernels.engine.async_llm import AsyncLLM
    from fastkernels.engine.llm import LLM
    from fastkernels.engine.options.config import EngineConfig
    from fastkernels.engine.sampling.sampling_params import SamplingParams
    from fastkernels.engine.sampling.unmask_params import UnmaskParams
    from fastkernels.engine.scheduling.acting import ActionParams
    from fastkernels.engine.scheduling.denoising import ImageParams, VideoParams
    from fastkernels.engine.scheduling.folding import FoldParams
    from fastkernels.engine.scheduling.rendering import RenderParams
    from fastkernels.engine.scheduling.rollout import FrameParams
    from fastkernels.engine.scheduling.speaking import SpeechParams
    from fastkernels.engine.structured.params import StructuredOutputsParams
    from fastkernels.models.common.plans.plan import plan
    from fastkernels.patch import Report, patch, patch_async, unpatch, unpatch_async


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module 'fastkernels' has no attribute {name!r}")
