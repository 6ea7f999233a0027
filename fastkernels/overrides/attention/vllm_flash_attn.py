"""FlashAttention-3 of an installed vLLM's wheel, without vLLM itself: importing that takes seconds."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "_fastkernels_vllm_flash_attn"  # the name that vLLM's folder has in this process


def load(module: str) -> Any:
    """`module`, which is vllm.vllm_flash_attn: its file of entries alone where vLLM is not in this process already, and
    if they need nothing else. Raises ImportError.
    """
    host = module.partition(".")[0]
    if host not in sys.modules:
        try:
            return _alone(module)
        except Exception:  # of another version: as it wants to be imported
            sys.modules.pop(PACKAGE, None)
            sys.modules.pop(f"{PACKAGE}.flash_attn_interface", None)
    return importlib.import_module(module)


def _alone(module: str) -> Any:
    found, path = None, None
    for name in module.split("."):
        found = PathFinder.find_spec(name, path)
        if found is None or not found.submodule_search_locations:
            raise ImportError(f"there is no package {module}")
        path = list(found.submodule_search_locations)
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = path or []
    entries = importlib.import_module(f"{PACKAGE}.flash_attn_interface")
    if not entries.FA3_AVAILABLE:
        raise ImportError(f"{module} has no FlashAttention-3: {entries.FA3_UNAVAILABLE_REASON}")
    return entries
