"""A set: a folder of candidates that is scored as one.

A plain set has one file OP.py per op, as `fk-bench kernels --candidate DIR` takes it. A folder of a known foreign
layout is adapted: each of its files becomes such a file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from fastkernels.core import candidate, registry
from fastkernels.core.candidate import CandidateError
from fastkernels.models.common.descriptions.registry import models
from fk_bench.evaluate.adapters.foreign_files import Adapted, digest_of, write

PLAIN = "plain"  # the layout of files that our tools take as they are
# Modules of fk_bench.evaluate.adapters: layouts of folders, and libraries, which are sets by their names
FOLDERS = ("published", "trace", "kernelbench", "hf_kernels")
LIBRARIES = ("liger", "quack", "fla", "flashinfer", "inductor")
ADAPTED = Path("fk-bench-runs") / "adapted"


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


def layout_of(folder: Path) -> str:
    """The layout of an existing folder: PLAIN, or one of FOLDERS."""
    return next((name for name in FOLDERS if _module(name).recognizes(folder)), PLAIN)


def read_set(name: str, folder: Path, out: Path | None = None, blocks: bool = False) -> CandidateSet:
    """Read a set. Nothing in it is imported. Raises SetError.

    folder  of candidates; or one of LIBRARIES, unless there is such a folder
    out     where adapted files go; None: a folder below ADAPTED with the name and a digest of the set
    blocks  accept files named after blocks, MODEL.KIND; the process that runs the model knows which it has
    """
    if not folder.is_dir():
        if str(folder) in LIBRARIES:
            return _library(name, str(folder), out)
        raise SetError(
            f"set {name}: there is no folder {folder}, and it is no library ({', '.join(LIBRARIES)})"
        )
    layout = layout_of(folder)
    if layout == PLAIN:
        root = folder.parent if folder.name == "solutions" else folder
        if (root / "definitions").is_dir() and (root / "solutions").is_dir():
            raise SetError(
                f"set {name}: {root} is a FlashInfer-Trace data set, which has solutions of several authors. `fk-bench"
                f" trace import {root} --out imported`, then --set {name}=imported/candidates/AUTHOR"
            )
        named = [f for f in sorted(folder.glob("*.py")) if candidate.is_block(f.stem)]
        if blocks and (wrong := [f for f in named if f.stem.partition(".")[0] not in models()]):
            model = wrong[0].stem.partition(".")[0]
            raise SetError(
                f"set {name}: {wrong[0]} is named after a block of {model!r}, which is no model; `fk-bench list models`"
                " has their names"
            )
        if not blocks and (unknown := [f for f in named if _is_unknown_block(f.stem)]):
            raise SetError(
                f"set {name}: {unknown[0]} is a block of one model. `fk-bench kernels --model"
                f" {unknown[0].name.partition('.')[0]} --candidate {folder}` judges it, and `fk-bench eval` runs it in"
                " our engine; here a set has ops only: move the files with such names to another folder"
            )
        try:
            found = candidate.from_directory(folder, blocks=blocks)
        except CandidateError as error:
            raise SetError(f"set {name}: {error}") from error
        below = (f for f in sorted(folder.glob("[!_.]*/*.py")) if f.stem in found)
        if twice := next(below, None):
            raise SetError(
                f"set {name}: {found[twice.stem]} and {twice} are both for {twice.stem}; remove one"
            )
        return CandidateSet(
            name, folder, tuple(SetFile(op, Path(p), Path(p), PLAIN) for op, p in sorted(found.items()))
        )
    if mixed := [f for f in sorted(folder.glob("*.py")) if registry.known(f.stem)]:
        raise SetError(
            f"set {name}: {mixed[0]} is a candidate for {mixed[0].stem}, and the other files of {folder} have the"
            f" layout {layout!r}; move one of them to a set of its own"
        )
    chosen, declined = _chosen(name, folder, layout)
    if not chosen:
        reasons = "; ".join(f"{d.path.name}: {d.reason}" for d in declined[:3])
        raise SetError(f"set {name}: no file of {folder} corresponds to an op of ours ({reasons})")
    if out is None:
        digest = digest_of({f"{op}/{k}": v for op, a in chosen.items() for k, v in a.files.items()})
        out = ADAPTED / f"{name}-{digest}"
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for op, one in sorted(chosen.items()):
        try:
            files.append(SetFile(op, write(one, layout, out).resolve(), one.source, layout))
        except (OSError, ValueError) as error:  # names that are too long, or a file and a folder of one name
            raise SetError(f"set {name}: the sources of {one.source} cannot be written: {error}") from error
    return CandidateSet(name, folder, tuple(files), tuple(declined))


def _is_unknown_block(stem: str) -> bool:
    """Whether a file is named MODEL.KIND, and no command has registered that model's blocks."""
    model, dot, _ = stem.partition(".")
    return (
        bool(dot) and model in models() and not registry.known(stem) and not registry.known(f"{model}.model")
    )


def _library(name: str, library: str, out: Path | None) -> CandidateSet:
    """The functions of an installed library, one file per op."""
    module = _module(library)
    version = _version(module.PACKAGE)
    if version is None:
        raise SetError(f"set {name}: {library} is not installed here (package {module.PACKAGE})")
    out = out or ADAPTED / f"{library}-{version}"
    out.mkdir(parents=True, exist_ok=True)
    source = Path(str(module.__file__))
    files = (
        SetFile(op, write(Adapted(op, {}, {}), library, out).resolve(), source, library)
        for op in sorted(module.ops() if hasattr(module, "ops") else module.FUNCTIONS)
    )
    return CandidateSet(name, Path(library), tuple(files))


def _version(package: str) -> str | None:
    """The version of an installed package, by the name that it is imported by."""
    if importlib.util.find_spec(package) is None:
        return None
    distributions = metadata.packages_distributions().get(package, [])
    return metadata.version(distributions[0]) if distributions else "local"


def _chosen(name: str, folder: Path, layout: str) -> tuple[Mapping[str, Adapted], list[Declined]]:
    """The file for each op, and the files without an op. Raises SetError for two files of one op."""
    chosen: dict[str, Adapted] = {}
    declined = []
    for file, found in _module(layout).adapted(folder):
        if not isinstance(found, Adapted):
            declined.append(Declined(file, str(found)))
        elif found.op in chosen:
            raise SetError(
                f"set {name}: {chosen[found.op].source} and {file} are both for {found.op}; remove one"
            )
        else:
            chosen[found.op] = found
    return chosen, declined


def _module(layout: str) -> ModuleType:
    return importlib.import_module(f"fk_bench.evaluate.adapters.{layout}")
