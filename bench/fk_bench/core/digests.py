"""Digests of candidates, by which rows of several commands name the same source."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastkernels.core.candidate import sources


def digest_of(file: Path) -> str:
    """Of a candidate with its own folder of sources."""
    made = hashlib.sha256(file.read_bytes())
    for path in sources(file):
        made.update(str(path.relative_to(file.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]
