"""Why a candidate of a set was dropped, and the reason of an exception by its type."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Iterator
from enum import Enum
from typing import Any

CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCapture...: a call that no CUDA graph may contain
_MODULES = (  # of exception classes
    ("torch._dynamo", "GRAPHS"), ("torch._inductor", "GRAPHS"), ("torch.fx", "GRAPHS"), ("triton.compiler", "COMPILE"),
    ("triton.runtime", "COMPILE"),
)  # fmt: skip


class Reason(str, Enum):
    """Why a candidate was dropped. UNUSED is no failure: the model has no place for the op."""

    IMPORT = "import"  # the file does not import, or offers nothing that fits the op
    COMPILE = "compile"
    RUN_TIME = "run time"  # a call raised, or the process ended
    TIME_LIMIT = "time limit"
    MEMORY_LIMIT = "memory limit"
    UNSUPPORTED = "unsupported"  # the patch refused it, or a call raised NotImplementedError
    INCORRECT = "incorrect"
    GRAPHS = "incompatible with graphs or torch.compile"
    COMPILES_WHILE_SERVING = "compiles while serving"
    NOT_DEPLOYED = "not deployed"  # in place, and no call ran it
    UNUSED = "unused"
    INSENSITIVE = "insensitive"  # of an item: its outputs do not show planted faults

    @property
    def harmless(self) -> bool:
        """Whether the set runs as it is in spite of it: the host's own code runs in the candidate's place."""
        return self in (Reason.UNSUPPORTED, Reason.NOT_DEPLOYED, Reason.UNUSED)


def reason_of(error: BaseException) -> Reason:
    """The reason of an exception, by the types of it and of its causes."""
    from fastkernels.core.candidate import CandidateError, WrongOutput

    for one in _chain(error):
        if isinstance(one, WrongOutput):
            return Reason.INCORRECT
        if isinstance(one, CandidateError):
            return Reason.IMPORT
        if isinstance(one, MemoryError) or type(one).__name__ == "OutOfMemoryError":
            return Reason.MEMORY_LIMIT
        if getattr(one, "error_code", None) in CAPTURE_ERRORS:
            return Reason.GRAPHS
        if isinstance(one, subprocess.CalledProcessError):
            return Reason.COMPILE
        if isinstance(one, NotImplementedError):
            return Reason.UNSUPPORTED
        for cls in type(one).__mro__:
            for module, name in _MODULES:
                if cls.__module__.startswith(module):
                    return Reason[name]
    return Reason.RUN_TIME


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def described(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: its reason, one line of text, and the files of its traceback, the innermost first."""
    files = [f.filename for one in _chain(error) for f in reversed(traceback.extract_tb(one.__traceback__))]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return {"reason": reason_of(error).value, "text": text[:500], "files": list(dict.fromkeys(files))}
