"""The answer of a host's process whose patch was refused: the reason in one line, in place of a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def answered(answers: TextIO) -> Iterator[None]:
    """Write a PatchError as {"refused": reason}, for which `HostProcess.answer` raises HostFailed; end the process."""
    from fastkernels.patch import PatchError

    try:
        yield
    except PatchError as error:
        print(json.dumps({"refused": " ".join(str(error).split())}), file=answers, flush=True)
        raise SystemExit(1) from None
