"""Record the calls of our ops while a model runs, in whatever host it runs: signatures, counts, and integer inputs.

    from fastkernels import capture

    with capture.record_modules() as modules:
        llm = LLM(model)
    with capture.record() as recording:
        llm.generate(prompts)
    recording.modules = modules.rows()
    recording.save("captures/mine", {"model": ..., "host": ..., "scenario": ...})

What is recorded is what the op's body is called with, before it changes anything. A replayed CUDA graph runs no
body: capture eager engines. What is float is data that a model computes, and only its shape, strides and dtype are
kept; integers (routing, block tables, slots, lengths, positions) decide what a kernel does, and are kept themselves.
"""

from fastkernels.capture.calls import FLOAT_VALUES, extent
from fastkernels.capture.keep import SCHEMA, Limits
from fastkernels.capture.modules import Modules, record_modules
from fastkernels.capture.recording import Recording, record, start, stop

__all__ = [
    "FLOAT_VALUES", "SCHEMA", "Limits", "Modules", "Recording", "extent", "record", "record_modules", "start", "stop",
]  # fmt: skip
