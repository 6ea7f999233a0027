"""A user's kernel: one file that offers the op's function, a module class with our class's name, or both."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from . import registry


class CandidateError(ValueError):
    """The candidate file cannot be used; the message says why and what it must offer."""


@dataclass(frozen=True)
class Candidate:
    """What a candidate file offers for an op: `function` is live everywhere, `classes` at module positions."""

    op: str
    path: str
    function: Callable[..., Any] | None
    classes: dict[str, type]

    @property
    def kind(self) -> str:
        return "+".join(k for k, v in (("function", self.function), ("class", self.classes)) if v)


def load(op: str, path: str) -> Candidate:
    """Import the file at `path` (its code runs) and find what it offers for `op`.

    Raises UnknownName for the op, CandidateError for a file that is missing, does not import or offers nothing.
    """
    spec = registry.get(op)
    file = Path(path).expanduser()
    if not file.is_file():
        raise CandidateError(f"candidate for {op}: there is no file {path}")
    module = _import(op, file)
    function = getattr(module, op, None)
    if function is not None and not callable(function):
        raise CandidateError(f"candidate {path}: {op} is {type(function).__name__}, not a function")
    names = {t.cls for t in spec.targets}
    classes = {n: getattr(module, n) for n in names if isinstance(getattr(module, n, None), type)}
    if function is None and not classes:
        offers = ", ".join(sorted(names)) or "no class"
        raise CandidateError(f"candidate {path} offers neither a function {op}(...) nor a class ({offers})")
    return Candidate(op, str(file), function, classes)


def _import(op: str, file: Path) -> ModuleType:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    name = f"fastkernels_candidate_{op}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise CandidateError(f"candidate {file} does not import: {type(error).__name__}: {error}") from error
    return module
