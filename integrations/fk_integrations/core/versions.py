"""The known versions of each host: signatures and source fingerprints, recorded from its wheels.

HOST/signatures/VERSION.json: {"host", "version", "classes": {"module:Name": {"fingerprint", "call", "methods", ...}}}
The newest version is recorded whole. The file of an older one has "next", the version after it, and only what differs
from that: the fields of each class that changed, with null for a class or field that is not in the older version.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib.metadata
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fastkernels.core.reasons import Kind, Reason

PACKAGE = Path(__file__).resolve().parents[1]


@lru_cache(maxsize=16)
def _definition(module_source: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
    """A module's top-level class or function; for a function with typing overloads, the implementation."""
    todo: list[ast.AST] = [ast.parse(module_source)]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            if node.name == name and not is_overload(node):
                return node
        else:  # the bodies of module, if and try are at the top level too
            todo.extend(reversed(list(ast.iter_child_nodes(node))))
    return None


def is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether this is a typing overload, not the function itself."""
    return any(ast.unparse(d).rpartition(".")[2] == "overload" for d in node.decorator_list)


def source_of(module_source: str, name: str) -> str | None:
    """The lines of a module's top-level class or function, decorators included; None if there is no such name."""
    node = _definition(module_source, name)
    return None if node is None else lines_of(module_source, node)


def lines_of(module_source: str, node: ast.ClassDef | ast.FunctionDef) -> str:
    """The lines of a class or function of a module, decorators included."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(module_source.splitlines()[first - 1 : node.end_lineno])


def fingerprint(source: str) -> str:
    """A hash of the source text without blank lines and trailing spaces. The same under every Python."""
    lines = [line.rstrip() for line in textwrap.dedent(source).splitlines() if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def semantics(methods: Callable[[str], ast.FunctionDef | None], name: str = "forward") -> str:
    """A hash of what a method computes: its statements and those of the methods of its class that it calls.

    Comments, docstrings, annotations and the names of parameters do not matter. '' if there is no such method.

    methods  the class's own method of a name, None if it has none
    """
    found: dict[str, str] = {}
    todo = [name]
    while todo:
        name = todo.pop()
        node = None if name in found else methods(name)
        if node is None:
            continue
        found[name], called = _computed(node)
        todo += called
    return hashlib.sha256("\n".join(found.values()).encode()).hexdigest()[:16] if found else ""


@lru_cache(maxsize=4096)
def _computed(node: ast.FunctionDef) -> tuple[str, list[str]]:
    """The statements of a function with renamed parameters, and the methods of its first parameter that it calls."""
    tree = _Renamed(node).visit(ast.Module(_without_docstring(copy.deepcopy(node.body)), []))
    called = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
    methods = [f.attr for f in called if isinstance(f, ast.Attribute) and ast.unparse(f.value) == "p0"]
    return ast.unparse(tree), methods


class _Renamed(ast.NodeTransformer):
    """Call the parameters of a function p0, p1, ...; keyword arguments and attributes keep their names."""

    def __init__(self, node: ast.FunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names = {a.arg: f"p{i}" for i, a in enumerate(arguments)}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if text else body


@cache
def installed(*distributions: str) -> str | None:
    """The version of the first distribution that is installed, without a local part; None if there is none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def recorded(host: str, package: Path = PACKAGE) -> dict[str, dict[str, Any]]:
    """{version: recorded data} of a host, oldest first."""
    files = (json.loads(f.read_text()) for f in package.glob(f"{host}/signatures/*.json"))
    found: dict[str, dict[str, Any]] = {}
    for data in sorted(files, key=lambda d: number(d["version"]), reverse=True):
        if "next" in data:
            data["classes"] = older(found[data.pop("next")]["classes"], data["classes"])
        found[data["version"]] = data
    return dict(reversed(found.items()))


def older(classes: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The classes of the version before, from its changes (see `changes_of`)."""
    found = {**classes, **changes}
    for path, fields in changes.items():
        if fields is not None:
            found[path] = {k: v for k, v in {**classes.get(path, {}), **fields}.items() if v is not None}
    return {path: found[path] for path in sorted(found) if found[path] is not None}


def changes_of(classes: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """{path: fields} of what differs from a newer version; None: the path or field is not in the older one."""
    found: dict[str, Any] = {}
    for path in sorted({*classes, *newer}):
        ours, theirs = classes.get(path), newer.get(path, {})
        if ours is None:
            found[path] = None
        elif ours != theirs:
            found[path] = {k: ours.get(k) for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)}
    return found


def unknown(host: str, version: str, path: str, host_class: Any) -> Reason | None:
    """None if this class's source is a recorded one and its methods are unchanged, else why the op is off."""
    module, name = sys.modules[host_class.__module__], path.partition(":")[2]
    try:
        text = inspect.getsource(module)
    except OSError as error:
        return Reason(Kind.UNKNOWN_VERSION, f"the source of {path} cannot be read: {error}")
    source = source_of(text, name)
    if source is None:
        return Reason(Kind.UNKNOWN_VERSION, f"{path} is not defined in {module.__name__}")
    line = unknown_source(host, version, path, fingerprint(source))
    return Reason(Kind.UNKNOWN_VERSION, line) if line else replaced(text, name, host_class)


def replaced(module_source: str, name: str, host_class: Any) -> Reason | None:
    """None if the methods of this class are those of its source, else which one other code has replaced.

    Only methods without decorators are compared: a decorator may return any object. A wrapper that a base class puts
    around a method of each subclass is not a replacement.
    """
    node, namespace = _definition(module_source, name), vars(sys.modules[host_class.__module__])
    for method in node.body if isinstance(node, ast.ClassDef) else []:
        if not isinstance(method, ast.FunctionDef) or method.decorator_list or method.name.startswith("__"):
            continue
        found = _unwrapped(vars(host_class).get(method.name), host_class)
        code = getattr(found, "__code__", None)
        where = (getattr(code, "co_name", None), getattr(code, "co_firstlineno", None))
        if getattr(found, "__globals__", None) is not namespace or where != (method.name, method.lineno):
            return Reason(Kind.REPLACED, f"{name}.{method.name} was replaced by other code (it is {found!r})")
    return None


def _unwrapped(method: Any, host_class: Any) -> Any:
    """The method without the wrapper of a base class's __init_subclass__: transformers' GradientCheckpointingLayer."""
    hooks = (vars(base).get("__init_subclass__") for base in host_class.__mro__[1:])
    made = [c for hook in hooks if isinstance(hook, classmethod) for c in hook.__func__.__code__.co_consts]
    code = getattr(method, "__code__", None)
    return getattr(method, "__wrapped__", method) if code is not None and code in made else method


def unknown_source(host: str, version: str, path: str, found: str) -> str | None:
    """None if `found` is the fingerprint of this path in a recorded version, else a line that says why not."""
    known = {v: d["classes"][path]["fingerprint"] for v, d in recorded(host).items() if path in d["classes"]}
    if found in known.values():
        return None
    listed = ", ".join(known) or "none"
    return f"{path} of {host} {version} has source {found}, which we do not know (known versions: {listed})"
