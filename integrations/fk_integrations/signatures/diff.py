"""Compare our classes with the recorded signatures of the host classes that they replace."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from fastkernels.core import registry
from fk_integrations.core.versions import PACKAGE, recorded

if TYPE_CHECKING:  # commands look up hosts and versions here before they import torch
    from fastkernels.core.spec import OpSpec, Target


@dataclass(frozen=True)
class SignatureDiff:
    """One (op, host class, version).

    exact     same names, order, kinds and defaults of __init__ and of the call; and a fork's class has all that the
              host uses: it inherits from the host's class, or ours lacks nothing. For the call of a dispatching
              forward(*args), ours accepts what it accepts, and may have further optional keywords
    lacks     what the host's subclasses override and its code uses, and our own class, built without the host, lacks
    inherits  whether a live host and a fork keep the host's class, with methods of ours
    """

    op: str
    host: str
    version: str
    cls: str
    path: str
    exact: bool
    difference: str
    lacks: tuple[str, ...] = ()
    inherits: bool = False

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        return {"class": row.pop("cls"), **row}


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) and value.__module__.startswith("torch.nn.modules."):
        return f"nn.{value.__name__}"  # the name in hosts' sources
    if isinstance(value, (type, FunctionType)):
        return value.__name__
    if isinstance(value, BuiltinFunctionType) and value.__module__ == "torch":
        return f"torch.{value.__name__}"
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


def accepted(entry: dict[str, Any], method: str) -> str | None:
    """The recorded signature of a method; of `forward_native`, with the keywords of its dispatching forward."""
    recorded: str | None = entry["methods"].get(method)
    if method != "forward_native" or recorded is None or "dispatch" not in entry:
        return recorded
    taken, dispatcher = _arguments(recorded), _arguments(entry["dispatch"])
    taken.kwonlyargs += dispatcher.kwonlyargs
    taken.kw_defaults += dispatcher.kw_defaults
    return f"({ast.unparse(taken)})"


def _arguments(text: str) -> ast.arguments:
    function = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def _accepts(ours: str, theirs: str) -> bool:
    """Whether `ours` is `theirs`, or has further keywords with a default of None."""
    if ours == theirs:
        return True
    mine, names = _arguments(ours), {a.arg for a in _arguments(theirs).kwonlyargs}
    kept = [
        (a, d) for a, d in zip(mine.kwonlyargs, mine.kw_defaults, strict=True)
        if a.arg in names or d is None or ast.unparse(d) != "None"
    ]  # fmt: skip
    mine.kwonlyargs, mine.kw_defaults = [a for a, _ in kept], [d for _, d in kept]
    return ast.unparse(mine) == ast.unparse(_arguments(theirs))


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
        recorded = accepted(entry, method)
        # Our forward replaces the host's dispatched methods; quant methods and backends keep the host's name.
        name = "forward" if method == "forward_native" else method
        found = our_signature(ours, name)
        dispatched = name != method and recorded is not None and found is not None
        if recorded != found and not (dispatched and _accepts(found, recorded)):  # type: ignore[arg-type]
            lines.append(
                f"{method}: host {recorded or 'has none of its own'}, ours {found or 'has none of its own'}"
            )
    return "; ".join(lines)


def lacking(entry: dict[str, Any], ours: Any) -> tuple[str, ...]:
    """Members that the host uses of its class (the recorded surface) and ours does not have."""
    surface = entry.get("surface", {})
    names = {*surface.get("overridden", ()), *surface.get("used", ())}
    return tuple(sorted(n for n in names if not hasattr(ours, n) and n not in _set_by_methods(ours)))


def _set_by_methods(ours: type) -> set[str]:
    """Attributes that the methods of the class and its bases set on `self`."""
    known = ("torch", "builtins", "typing", "abc")
    return set().union(*(_set_by(b) for b in ours.__mro__ if b.__module__.partition(".")[0] not in known))


@cache
def _set_by(cls: type) -> set[str]:
    """Those that its own methods set."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
    stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    names = {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return names | {n.args[0].value for n in nodes if _registers(n)}  # type: ignore[attr-defined]


def _registers(node: ast.AST) -> bool:
    """Whether the node is self.register_buffer("name", ...) or register_parameter."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("register_buffer", "register_parameter")
        and isinstance(node.args[0], ast.Constant)
    )


def compare(spec: OpSpec, target: Target, version: str) -> SignatureDiff:
    """Compare the target's class with the record of that version, which must have the target's path."""
    from fastkernels.export.exporter import METHOD_SEAMS

    ours, entry = registry.target_class(target), recorded(target.host)[version]["classes"][target.path]
    found = difference(entry, ours)
    lacks = lacking(entry, ours) if isinstance(ours, type) else ()
    inherits = isinstance(ours, type) and target.seam in METHOD_SEAMS
    if lacks and not inherits:
        found = "; ".join([*([found] if found else []), f"lacks {', '.join(lacks)}, which the host uses"])
    reason = f"{found}. {target.note}" if found and target.note else found
    return SignatureDiff(
        spec.name, target.host, version, target.cls, target.path, not found, reason, lacks, inherits
    )


def hosts() -> list[str]:
    """Hosts with a recorded version. torch is none: its classes are parts of every host's models."""
    return sorted({f.parents[1].name for f in PACKAGE.glob("*/signatures/*.json")} - {"torch"})


def versions(host: str) -> list[str]:
    """The recorded versions of a host, oldest first."""
    return list(recorded(host))


def comparisons(ops: list[str] | None = None) -> Iterator[SignatureDiff]:
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
                    yield SignatureDiff(name, target.host, version, target.cls, target.path, False, missing)
