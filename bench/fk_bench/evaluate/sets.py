"""A set: a folder of candidates that is scored as one.

A plain set has one file OP.py per op, as `fk-bench kernels --candidate DIR` takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastkernels.core import candidate
from fastkernels.core.candidate import CandidateError

PLAIN = "plain"  # the layout of files that our tools take as they are


class SetError(ValueError):
    """A folder that is no set. The message names the folder and what a set is."""


@dataclass(frozen=True)
class SetFile:
    """A candidate of a set: `path` is the file that our tools take, `source` the author's file."""

    op: str
    path: Path
    source: Path
    layout: str


@dataclass(frozen=True)
class Declined:
    """A file of a set that cannot be used for any op, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class CandidateSet:
    """The candidates of a folder, in the order of their ops, and the files without an op of ours."""

    name: str
    folder: Path
    candidates: tuple[SetFile, ...]
    declined: tuple[Declined, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """{op: file}, as `fastkernels.patch(candidates=...)` takes it."""
        return {c.op: str(c.path) for c in self.candidates}


def read_set(name: str, folder: Path) -> CandidateSet:
    """Read a set. Nothing in it is imported. Raises SetError."""
    try:
        found = candidate.from_directory(folder)
    except CandidateError as error:
        raise SetError(f"set {name}: {error}") from error
    files = tuple(SetFile(op, Path(path), Path(path), PLAIN) for op, path in sorted(found.items()))
    return CandidateSet(name, folder, files)
