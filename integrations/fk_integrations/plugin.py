"""What vLLM and SGLang load at start (their own plugin entry points). Inert unless FASTKERNELS=1."""

from __future__ import annotations

import os
import sys


def vllm() -> None:
    """Entry point `vllm.general_plugins`: runs in the front end, the engine core and every worker."""
    from . import vllm as host

    host.register()


def sglang() -> None:
    """Entry point `sglang.srt.plugins`: runs in the main process and in every scheduler."""
    try:
        from . import sglang as host

        host.register()
    except Exception as error:  # SGLang would log it and run unpatched
        if os.environ.get("FASTKERNELS", "").strip().lower() in ("1", "true", "yes", "on"):
            sys.exit(f"fastkernels: FASTKERNELS is set, but the plugin fails: {type(error).__name__}: {error}")
        raise
