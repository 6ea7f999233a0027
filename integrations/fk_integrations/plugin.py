"""Entry points that vLLM and SGLang load at start. Inert unless FASTKERNELS=1.

Both hosts log a plugin's exception and continue without it, which would be an unpatched run. With FASTKERNELS=1 a
failure therefore ends the process.
"""

from __future__ import annotations

import importlib
import os


def _register(name: str, title: str) -> None:
    try:
        importlib.import_module(f"{__package__}.core.call_recording").modules_from_environment()
        importlib.import_module(f"{__package__}.{name}.host").register()
    except Exception as error:
        if os.environ.get("FASTKERNELS", "").strip().lower() in ("", "0", "false", "no", "off"):
            raise
        raise SystemExit(f"fastkernels: FASTKERNELS=1, but {title} cannot be patched: {error}") from error


def vllm() -> None:
    """Entry point `vllm.general_plugins`: runs in the front end, the engine core and every worker."""
    _register("vllm", "vLLM")


def sglang() -> None:
    """Entry point `sglang.srt.plugins`: runs in the main process and in every scheduler."""
    _register("sglang", "SGLang")
