"""Who runs the steps: the model of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import EngineConfig
from .runner import ModelRunner


def make_executor(config: EngineConfig, folder: Path, hf_config: Any) -> ModelRunner:
    """The model's runner. Raises what building the model raises."""
    return ModelRunner(config, folder, hf_config)
