"""Record a host version's signatures and source fingerprints from its unpacked wheel, by AST: nothing is imported.

    python -m fk_integrations.signatures.recorder HOST VERSION SOURCE_DIR [--add module.path:Name ...]

writes HOST/signatures/VERSION.json (versions.py says what the files of older versions have):

    {"host", "version", "classes": {"module.path:Name": {
        "kind": "class" | "function", "fingerprint",
        "call": the method that states the call ("" for a function, which is its own),
        "methods": {"__init__": "(hidden_size, eps=1e-06, *, prefix='')", "forward": ..., ...},
        "static": [methods that are static],
        "dispatch": the signature of a `forward` that hands its arguments (*args) to `forward_native` or its like,
        "semantics": a hash of what the function or `forward` computes (models of transformers only),
        "surface": what the host itself uses of a class that we replace; see surface.py}}}

A signature is its text without `self` and annotations: names, order, kinds and defaults. A default that is a
literal, or a module's constant, is its repr; any other is its source text.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fk_integrations.core import versions
from fk_integrations.signatures.host_classes import LISTED
from fk_integrations.signatures.surface import Package

METHODS = (
    "__init__", "forward", "forward_native", "apply", "embedding", "forward_extend", "forward_decode",
    "apply_scaled_mm", "apply_weights", "run", "__call__", "all_reduce",
)  # fmt: skip
CALLS = (
    "forward",
    "forward_native",
    "apply",
    "forward_extend",
    "apply_scaled_mm",
    "apply_weights",
    "run",
    "__call__",
    "all_reduce",
)
MAX_HOPS = 8  # re-exports to follow until a name's definition


class RecordError(ValueError):
    """The source folder lacks the package; the message names it."""


@dataclass
class Module:
    """One parsed source file: what its top level defines, imports and sets."""

    name: str
    file: Path
    source: str
    defined: dict[str, ast.ClassDef | ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name: (module, name there)
    constants: dict[str, ast.expr] = field(default_factory=dict)


class Sources:
    """The modules under a folder, parsed on demand."""

    def __init__(self, root: Path):
        self.root = root
        self.module = lru_cache(maxsize=None)(self._module)

    def _module(self, name: str) -> Module | None:
        base = self.root.joinpath(*name.split("."))
        file = base.with_suffix(".py")
        package = not file.is_file()
        if package:
            file = base / "__init__.py"
        if not file.is_file():
            return None
        found = Module(name, file, file.read_text(encoding="utf-8"))
        _read_top_level(ast.parse(found.source), found, package)
        return found

    def find(self, module: str, name: str) -> tuple[Module, str] | None:
        """Where a name that is visible in a module is defined, re-exports followed."""
        for _ in range(MAX_HOPS):
            here = self.module(module)
            if here is None:
                return None
            if name in here.defined or name in here.constants:
                return here, name
            if name not in here.imported:
                return None
            module, name = here.imported[name]
        return None

    def lineage(self, module: Module, name: str) -> list[tuple[Module, ast.ClassDef]]:
        """The class and its bases inside the folder, depth first, each once."""
        node = module.defined[name]
        if not isinstance(node, ast.ClassDef):
            return []
        line = [(module, node)]
        for base in node.bases:
            found = self.find(module.name, base.id) if isinstance(base, ast.Name) else None
            if found is not None and found[1] in found[0].defined and found != (module, name):
                line += [pair for pair in self.lineage(*found) if pair not in line]
        return line


def _read_top_level(tree: ast.Module, into: Module, package: bool) -> None:
    todo: list[ast.stmt] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            if not versions.is_overload(node):
                into.defined.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            parent = into.name.split(".") if package else into.name.split(".")[:-1]
            start = parent[: len(parent) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            into.imported.update({a.asname or a.name: (source, a.name) for a in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            into.constants.setdefault(node.targets[0].id, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            into.constants.setdefault(node.target.id, node.value)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
            inner += [s for h in getattr(node, "handlers", []) for s in h.body]
            todo.extend(reversed(inner))


def _default(node: ast.expr, sources: Sources, module: Module) -> str:
    if isinstance(node, ast.Name):
        found = sources.find(module.name, node.id)
        if found is not None and found[1] in found[0].constants:
            return _default(found[0].constants[found[1]], sources, found[0])
    try:
        return repr(ast.literal_eval(_Floats().visit(copy.deepcopy(node))))
    except ValueError:
        quotient = _quotient(node)
        return ast.unparse(node) if quotient is None else repr(quotient)


class _Floats(ast.NodeTransformer):
    """Calls such as float("inf") as the numbers that they give, by which inspect knows a default of ours."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        given = node.args[0] if len(node.args) == 1 else None
        named = isinstance(node.func, ast.Name) and node.func.id == "float"
        return ast.Constant(float(given.value)) if named and isinstance(given, ast.Constant) else node  # type: ignore[arg-type]


def _quotient(node: ast.expr) -> float | None:
    """The value of a quotient of numbers, such as 1.0 / 16, by which inspect knows a default of ours."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return None
    a, b = (getattr(side, "value", None) for side in (node.left, node.right))
    return a / b if isinstance(a, (int, float)) and isinstance(b, (int, float)) and b else None


def signature_text(node: ast.FunctionDef, sources: Sources, module: Module, bound: bool) -> str:
    """'(x, residual=None, *, scale=1.0)': without the first argument when bound, without annotations."""
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(a.defaults)), *a.defaults]
    parts = []
    for i, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
        if not (bound and i == 0):
            parts.append(arg.arg if default is None else f"{arg.arg}={_default(default, sources, module)}")
        if i + 1 == len(a.posonlyargs) and parts:
            parts.append("/")
    if a.vararg:
        parts.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        parts.append("*")
    for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        parts.append(arg.arg if default is None else f"{arg.arg}={_default(default, sources, module)}")
    if a.kwarg:
        parts.append(f"**{a.kwarg.arg}")
    return f"({', '.join(parts)})"


def _is_static(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


def describe(sources: Sources, path: str) -> dict[str, Any] | None:
    """The record of one class or function; None if the folder does not have that path."""
    module_name, _, name = path.partition(":")
    module = sources.module(module_name)
    if module is None or name not in module.defined:
        return None
    node = module.defined[name]
    entry: dict[str, Any] = {"fingerprint": versions.fingerprint(versions.lines_of(module.source, node))}
    methods: dict[str, str] = {}
    if isinstance(node, ast.FunctionDef):
        methods["__call__"] = signature_text(node, sources, module, bound=False)
        if path.startswith("transformers.models."):
            entry["semantics"] = versions.semantics({name: node}.get, name)
        return {"kind": "function", "call": "__call__", "methods": methods, "static": [], **entry}
    static: list[str] = []
    for where, cls in reversed(sources.lineage(module, name)):
        for item in cls.body:
            if isinstance(item, ast.FunctionDef) and item.name in METHODS:
                methods[item.name] = signature_text(item, sources, where, bound=not _is_static(item))
                static = [s for s in static if s != item.name] + ([item.name] if _is_static(item) else [])
    if path.startswith("transformers.models."):
        own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        entry["semantics"] = versions.semantics(own.get)
    dispatched = methods.get("forward", "").startswith("(*") and "forward_native" in methods
    calls = [m for m in CALLS if m in methods and not (dispatched and m == "forward")]
    if dispatched:
        entry["dispatch"] = methods.pop("forward")
    return {
        "kind": "class", "call": calls[0] if calls else "", "methods": methods, "static": static, **entry,
    }  # fmt: skip


def record(
    host: str, version: str, root: Path, paths: list[str], replaced: Collection[str] = ()
) -> dict[str, Any]:
    """The recorded data of one host version. Paths that this version does not have are left out.

    replaced: paths of classes whose surface is recorded, too, which reads the whole package

    Raises RecordError when `root` holds no package of the host's name.
    """
    if not (root / host).is_dir():
        raise RecordError(f"{root} has no folder {host!r}: give the folder that the wheel was unpacked into")
    sources = Sources(root)
    found = {path: describe(sources, path) for path in sorted(set(paths))}
    classes = {p: d for p, d in found.items() if d is not None}
    kept = [p for p in sorted(classes.keys() & set(replaced)) if classes[p]["kind"] == "class"]
    if kept:
        package = Package(sources, host, {path.partition(":")[2] for path in kept})
        for path in kept:
            classes[path]["surface"] = package.surface(*path.split(":"))
    return {"host": host, "version": version, "classes": classes}


def named(host: str) -> list[str]:
    """Every path that a target names for the host."""
    from fastkernels.core import registry

    names = *registry.op_names(), *registry.collective_names()
    return [t.path for op in names for t in registry.get(op).targets_for(host)]


def _compact(entry: dict[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"))


def write(data: dict[str, Any], folder: Path = versions.PACKAGE) -> Path:
    """Write the record of a version, and those of the host's other versions again: each differs from another now."""
    known = {**versions.recorded(data["host"], folder), data["version"]: data}
    order = sorted(known, key=versions.number)
    for version, after in zip_longest(order, order[1:]):
        classes, head = known[version]["classes"], {"host": data["host"], "version": version}
        if after is not None:
            classes, head["next"] = versions.changes_of(classes, known[after]["classes"]), after
        # one class a line: short files, whose changes can be read
        lines = (f"{json.dumps(p)}: {_compact(entry)}" for p, entry in sorted(classes.items()))
        file = folder / data["host"] / "signatures" / f"{version}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        start = json.dumps({**head, "classes": {}}).removesuffix("}}")
        file.write_text(start + "\n" + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    versions.recorded.cache_clear()
    return folder / data["host"] / "signatures" / f"{data['version']}.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fk_integrations.signatures.recorder", description="Record a host version."
    )
    parser.add_argument("host")
    parser.add_argument("version")
    parser.add_argument("source_dir", type=Path, help="folder that the wheel was unpacked into")
    parser.add_argument(
        "--add", nargs="*", default=[], metavar="PATH", help="further module.path:Name to record"
    )
    args = parser.parse_args(argv)
    paths = [*named(args.host), *LISTED.get(args.host, ()), *args.add]
    try:
        data = record(args.host, args.version, args.source_dir, paths, named(args.host))
    except RecordError as error:
        parser.error(str(error))
    missing = sorted(set(paths) - set(data["classes"]))
    print(
        f"{write(data)}: {len(data['classes'])} classes"
        + (f"; not in this version: {', '.join(missing)}" if missing else "")
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
