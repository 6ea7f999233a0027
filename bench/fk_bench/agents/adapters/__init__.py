"""Known agents, one a file: NETWORK, ENV (variables that it gets if set), OPTIONS (None: required) and `command`.

Most are themselves the program that runs in a task's folder: `python -m fk_bench.agents.adapters.NAME`.
"""

from __future__ import annotations

import importlib
from typing import Any

from fastkernels.core.registry import UnknownName

NAMES = ("codex", "claude", "kernelagent", "drkernel", "openevolve", "openai")


def find(name: str) -> Any:
    """The module of an agent. Raises UnknownName."""
    if name not in NAMES:
        raise UnknownName("agent", name, NAMES)
    return importlib.import_module(f"fk_bench.agents.adapters.{name}")
