"""Compare our classes with the recorded signatures of the host classes that they replace."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

from fastkernels.core import registry
from fastkernels.core.spec import OpSpec, Target
from fk_integrations.core.versions import PACKAGE, recorded


@dataclass(frozen=True)
class Comparison:
    """One (op, host class, version). exact: same names, order, kinds and defaults of __init__ and of the call."""

    op: str
    host: str
    version: str
    cls: str
    path: str
    exact: bool
    difference: str

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        return {"class": row.pop("cls"), **row}


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, (type, FunctionType)):
        return value.__name__
    return repr(value)


def signature_text(function: FunctionType, bound: bool) -> str:
    """The text of a function's own parameters, in the recorder's form. Ignores `__signature__`."""
    code, defaults, kw = function.__code__, function.__defaults__ or (), function.__kwdefaults__ or {}
    names = code.co_varnames
    n, n_kw = code.co_argcount, code.co_kwonlyargcount
    parts = []
    for i, name in enumerate(names[:n]):
        at = i - (n - len(defaults))
        if not (bound and i == 0):
            parts.append(f"{name}={_default(defaults[at])}" if at >= 0 else name)
        if i + 1 == code.co_posonlyargcount and parts:
            parts.append("/")
    rest = list(names[n + n_kw :])
    if code.co_flags & inspect.CO_VARARGS:
        parts.append(f"*{rest.pop(0)}")
    elif n_kw:
        parts.append("*")
    parts += [f"{name}={_default(kw[name])}" if name in kw else name for name in names[n : n + n_kw]]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        parts.append(f"**{rest.pop(0)}")
    return f"({', '.join(parts)})"


def our_signature(cls: type, method: str) -> str | None:
    """The text of our class's method; None if it is inherited from torch or object."""
    for base in cls.__mro__:
        found = base.__dict__.get(method)
        if found is not None:
            if base.__module__.partition(".")[0] in ("torch", "builtins"):
                return None
            static = isinstance(found, staticmethod)
            function = found.__func__ if static else found
            return signature_text(function, bound=not static) if isinstance(function, FunctionType) else None
    return None


def difference(entry: dict[str, Any], ours: Any) -> str:
    """'' if `ours` has the recorded signatures, else what differs, method by method."""
    if entry["kind"] == "function":
        theirs, mine = entry["methods"]["__call__"], signature_text(ours, bound=False)
        return "" if theirs == mine else f"host {theirs}, ours {mine}"
    lines = []
    methods = ["__init__", *([entry["call"]] if entry["call"] else [])]
    if entry["call"] == "apply" and hasattr(ours, "embedding"):  # an embedding's method has two calls
        methods.append("embedding")
    for method in methods:
        recorded = entry["methods"].get(method)
        # Our forward replaces the host's dispatched methods; quant methods and backends keep the host's name.
        name = "forward" if method == "forward_native" else method
        found = our_signature(ours, name)
        if recorded != found:
            lines.append(
                f"{method}: host {recorded or 'has none of its own'}, ours {found or 'has none of its own'}"
            )
    return "; ".join(lines)


def compare(spec: OpSpec, target: Target, version: str) -> Comparison:
    """Compare the target's class with the record of that version, which must have the target's path."""
    ours = registry.target_class(target)
    found = difference(recorded(target.host)[version]["classes"][target.path], ours)
    reason = f"{found}. {target.note}" if found and target.note else found
    return Comparison(spec.name, target.host, version, target.cls, target.path, not found, reason)


def hosts() -> list[str]:
    """Hosts with a recorded version. torch is none: its classes are parts of every host's models."""
    return sorted({f.parents[1].name for f in PACKAGE.glob("*/signatures/*.json")} - {"torch"})


def versions(host: str) -> list[str]:
    """The recorded versions of a host, oldest first."""
    return sorted(recorded(host), key=lambda v: tuple(int(part) for part in v.split(".")))


def comparisons(ops: list[str] | None = None) -> Iterator[Comparison]:
    """Every op, host and recorded version. A path that a target names and the version lacks is a difference."""
    for name in registry.op_names() if ops is None else ops:
        spec = registry.get(name)
        for target in spec.targets:
            for version in versions(target.host):
                if not target.applies_to(version):
                    continue
                if target.path in recorded(target.host)[version]["classes"]:
                    yield compare(spec, target, version)
                else:
                    missing = f"{target.path} is not in the record of {target.host} {version}"
                    yield Comparison(name, target.host, version, target.cls, target.path, False, missing)
