"""What vLLM and SGLang load at start (their own plugin entry points). Inert unless FASTKERNELS=1."""

from __future__ import annotations

import os


def vllm() -> None:
    """Entry point `vllm.general_plugins`: runs in the front end, the engine core and every worker.

    vLLM logs a plugin's exception and goes on without it, which would be an unpatched run: asked for by
    FASTKERNELS, a failure ends the process instead.
    """
    try:
        from . import vllm as host

        host.register()
    except Exception as error:
        if os.environ.get("FASTKERNELS", "").strip().lower() in ("", "0", "false", "no", "off"):
            raise
        raise SystemExit(f"fastkernels: FASTKERNELS=1, but vLLM cannot be patched: {error}") from error


def sglang() -> None:
    """Entry point `sglang.srt.plugins`: runs in the main process and in every scheduler."""
    from . import sglang as host

    host.register()
