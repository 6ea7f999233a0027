"""Recording in a host's process, for `fk-bench capture`: calls of our ops, and constructor arguments of modules.

The request record_start takes fastkernels.capture.Limits as options; record_stop takes 'folder' and 'meta', and rank 0
writes the folder. With FASTKERNELS_CAPTURE=1 constructors are recorded from the start of the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastkernels.core.env import Environment

if TYPE_CHECKING:
    from fastkernels.capture import Modules

_modules: Modules | None = None


def modules_from_environment() -> None:
    """Record constructors from here on if FASTKERNELS_CAPTURE=1. Called by the plugins; a second call does nothing."""
    global _modules
    if _modules is None and Environment.read().capture:
        from fastkernels.capture import Modules

        _modules = Modules()
        _modules.start()


def start(options: dict[str, Any]) -> None:
    from fastkernels import capture

    capture.start(capture.Limits(**options))


def stop(options: dict[str, Any], rank: int, model: Any) -> dict[str, Any]:
    """End the recording; rank 0 writes it. Returns the reply's fields."""
    from fastkernels import capture

    recording = capture.stop()
    if rank != 0:
        return {"recorded": recording.calls}
    if _modules is not None:
        recording.modules = _modules.rows(model)
    recording.save(options["folder"], options["meta"])
    return {"recorded": recording.calls}
