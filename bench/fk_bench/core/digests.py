"""The digest of a candidate, by which rows, submissions and lineage know it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastkernels.core.candidate import sources


def digest_of(file: Path) -> str:
    """Of a candidate's file with its own folder of sources. Raises OSError."""
    made = hashlib.sha256(file.read_bytes())
    for path in sources(file):
        if "__pycache__" not in path.parts:
            made.update(str(path.relative_to(file.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()[:16]
