"""vLLM's monitor of Triton compilations during inference (vllm.utils.jit_monitor).

It is active once an engine serves. A patch compiles kernels before it returns, which is not inference: the monitor
pauses for that time. Afterwards it reports ours like all others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Let kernels compile without a warning or, with --jit-monitor-mode=error, an error."""
    monitor = sys.modules.get("vllm.utils.jit_monitor")
    if monitor is None or not monitor.is_active():
        yield
        return
    from triton import knobs

    hook, printing = knobs.runtime.jit_post_compile_hook, knobs.autotuning.print
    knobs.runtime.jit_post_compile_hook, knobs.autotuning.print = None, False
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook, knobs.autotuning.print = hook, printing
