"""Known agents, one a file: a shell command for a task folder, what its cage leaves open, and how it reports tokens."""

# An adapter has NETWORK, ENV (variables that it gets if they are set), OPTIONS {name: default or None for a required
# one} and `command(options)`. Most are themselves the program: `python -m fk_bench.agents.adapters.NAME` in the folder.

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
