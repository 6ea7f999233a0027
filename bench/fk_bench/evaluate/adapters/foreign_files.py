"""Files of a foreign layout: the file that our tools take, with the author's sources in a folder next to it."""

from __future__ import annotations

import ast
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastkernels.core.candidate import sources_folder

HEADER = '''"""{op}: {origin}, adapted. The author's files, unchanged, are in the folder {folder}/ (digest {digest})."""

from fk_bench.evaluate.adapters.loading import foreign

{op} = foreign(__file__, {layout!r}, {op!r}, {facts!r})
'''


class Unadapted(Exception):
    """A file of a foreign layout that has no counterpart here. The message is the reason."""


@dataclass(frozen=True)
class Adapted:
    """A file of a foreign layout that can stand for an op.

    files   {path in the op's folder: the author's file}; the first is the one that the set names
    texts   {path in the op's folder: text} of sources that are parts of one file, such as a JSON document
    facts   literals that `bind` of the layout gets
    """

    op: str
    files: Mapping[str, Path]
    facts: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        return next(iter(self.files.values()))


def parsed(file: Path) -> ast.Module:
    """The syntax tree of a Python file. Raises Unadapted: for a pipe, too, whose reading never ends."""
    if not file.is_file():
        raise Unadapted(f"{file.name} is not a file")
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise Unadapted(f"{file.name} is no Python file: {error}") from error
    except (RecursionError, MemoryError):
        raise Unadapted(f"{file.name} is nested too deeply") from None


def write(found: Adapted, layout: str, out: Path) -> Path:
    """Write the op's file and its folder of sources into `out`; returns the file."""
    file = out / f"{found.op}.py"
    folder = sources_folder(file)
    shutil.rmtree(folder, ignore_errors=True)
    for name, source in found.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
    for name, text in found.texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    digest = digest_of(found.files)
    origin = next(iter(found.files), f"the kernel of {layout}")
    text = HEADER.format(
        op=found.op, origin=origin, folder=folder.name, digest=digest, layout=layout,
        facts=dict(found.facts),
    )  # fmt: skip
    file.write_text(text, encoding="utf-8")
    return file


def digest_of(files: Mapping[str, Path]) -> str:
    """A digest of names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:16]
