"""Put an op's exported files into a copy of a host's source."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from fastkernels.core import registry
from fastkernels.export.exporter import export, fork_targets
from fastkernels.export.source import ExportError


def put(op: str, host: str, version: str, folder: Path) -> list[Path]:
    """Save a file next to each module of the host that has a class or function of the op, and let the module end
    with an import of it. Return the new files. A file that others link to is replaced, not written to.

    folder  contains the host's package: a checkout, or the folder src or python in it

    Raises UnknownName for the op; ExportError, before any change, where the package, a module or a name is missing.
    """
    found = fork_targets(registry.get(op), host, version)
    if not found:
        raise ExportError(
            f"no class or function of {host} has the op {op}: save the printed file where it is called"
        )
    names: dict[str, list[str]] = {}
    for target in found:
        module, _, name = target.path.partition(":")
        names.setdefault(module, []).append(name)
    changes = {module: _change(op, host, version, folder, module, its) for module, its in names.items()}
    for ours, text, theirs, ending in changes.values():
        _write(ours, text)
        before = theirs.read_text()
        if ending not in before:
            _write(theirs, before.rstrip("\n") + ending)
    return [ours for ours, *_ in changes.values()]


def _change(
    op: str, host: str, version: str, folder: Path, module: str, names: list[str]
) -> tuple[Path, str, Path, str]:
    """(new file, its text, the host's file, what to append to that)."""
    if not (folder / host / "__init__.py").is_file():
        raise ExportError(f"{folder} has no package {host!r}: give the folder that contains it")
    path, package = folder.joinpath(*module.split(".")), module.rpartition(".")[0]
    theirs = path.with_suffix(".py")
    if (path / "__init__.py").is_file():
        theirs, package = path / "__init__.py", module
    if not theirs.is_file():
        raise ExportError(f"{theirs} does not exist: is this {host} {version}?")
    bound = {
        n.name
        for n in ast.walk(ast.parse(theirs.read_text()))
        if isinstance(n, (ast.ClassDef, ast.FunctionDef))
    }
    if missing := [name for name in names if name not in bound]:
        raise ExportError(f"{theirs} does not define {', '.join(missing)}: is this {host} {version}?")
    stem = f"fk_{op}_{path.name.removeprefix('modeling_')}"
    ending = f"\n\nfrom {package}.{stem} import {', '.join(names)}  # noqa: E402, F811\n"
    return theirs.with_name(f"{stem}.py"), export(op, host, version, only=module), theirs, ending


def _write(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    os.replace(new, file)
