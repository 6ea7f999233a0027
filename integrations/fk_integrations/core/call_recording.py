"""Recording in a host's process, for `fk-bench capture`: the calls of our ops, and how modules were constructed.

The requests are record_start, whose options are fastkernels.capture.Limits, and record_stop with the options 'folder'
and 'meta': rank 0 writes the folder. Constructors are recorded from the start of a process with FASTKERNELS_CAPTURE=1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastkernels.core.env import Environment

if TYPE_CHECKING:
    from fastkernels.capture import Modules

_modules: Modules | None = None


def modules_from_environment() -> None:
    """Record constructors from here on, if FASTKERNELS_CAPTURE asks for it. Called by the plugins; may be repeated."""
    global _modules
    if _modules is None and Environment.read().capture:
        from fastkernels.capture import Modules

        _modules = Modules()
        _modules.start()


def start(options: dict[str, Any]) -> None:
    from fastkernels import capture

    capture.start(capture.Limits(**options))


def stop(options: dict[str, Any], rank: int, model: Any) -> dict[str, Any]:
    """End the recording; of rank 0, write it. Returns what the reply has of it."""
    from fastkernels import capture

    recording = capture.stop()
    if rank != 0:
        return {"recorded": recording.calls}
    if _modules is not None:
        recording.modules = _modules.rows(model)
    recording.save(options["folder"], options["meta"])
    return {"recorded": recording.calls}
