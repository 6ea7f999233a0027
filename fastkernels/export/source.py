"""Read this package's own source for export: top-level statements, and the definition that each name refers to."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from fastkernels.core import registry
from fastkernels.export.simplify import Fork, simplified

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).resolve().parents[1]
PLAIN = {  # modules whose short version goes into an exported file
    f"{PACKAGE}.core.dispatch": "dispatch.py",
    f"{PACKAGE}.core.cuda_rtc": "cuda_rtc.py",
    f"{PACKAGE}.core.runtime.ahead": "launch.py",
    f"{PACKAGE}.overrides.kit.hopper": "hopper.py",
    f"{PACKAGE}.overrides.kit.overlap": "launch.py",
    f"{PACKAGE}.overrides.kit.launch": "launch.py",
    f"{PACKAGE}.overrides.kit.rows": "rows.py",
    f"{PACKAGE}.overrides.rope.rope_rounding": "rope_rounding.py",
}
LAYER = f"{PACKAGE}.overrides.block.decoder_layer"  # each of its norms has a fallback of its own
FORK = {  # in a file for a fork, in addition: calls that no kernel supports run the host's code
    **PLAIN,
    f"{PACKAGE}.core.dispatch": "fork.py",
    f"{PACKAGE}.overrides.routing.arguments": "fork_refuse.py",
    f"{PACKAGE}.overrides.kit.arguments": "fork_refuse.py",
    f"{PACKAGE}.overrides.kit.fp8_arguments": "fork_refuse.py",
    f"{PACKAGE}.overrides.quant.quantize_fp8": "fork_quantize.py",
    f"{PACKAGE}.overrides.linear.kernels.wgmma_linear_cuda": "fork_wgmma.py",
    f"{PACKAGE}.overrides.attention.attention_decode_cuda": "fork_decode.py",
    f"{PACKAGE}.overrides.kit.cublaslt": "fork_refuse.py",
    f"{PACKAGE}.overrides.linear.modules": "fork_refuse.py",
    f"{PACKAGE}.overrides.block.swiglu": "fork_refuse.py",
    f"{PACKAGE}.overrides.dense_attention.timm_projections": "fork_refuse.py",
    f"{PACKAGE}.overrides.rope.linear_rope": "fork_refuse.py",
    f"{PACKAGE}.overrides.diffusion.gelu_epilogue": "fork_refuse.py",
    f"{PACKAGE}.overrides.diffusion.modulated_pair": "fork_refuse.py",
    f"{PACKAGE}.overrides.diffusion.timm_residuals": "fork_refuse.py",
    f"{PACKAGE}.overrides.diffusion.modulation": "fork_refuse.py",
    f"{PACKAGE}.overrides.rope.qk_norm_rope_pair": "fork_refuse.py",
    LAYER: "fork_layer.py",
}
Key = tuple[str, str]  # (module, name at its top level)


class ExportError(ValueError):
    """The op cannot be exported for this host; the message gives the reason."""


@dataclass
class Statement:
    """A top-level statement: the names that it binds, and its byte range, comments above it included."""

    node: ast.stmt
    names: tuple[str, ...]
    start: int
    end: int

    @cached_property
    def assigned(self) -> set[str]:
        """Global names that functions in it assign."""
        return {name for node in ast.walk(self.node) if isinstance(node, ast.Global) for name in node.names}

    @cached_property
    def attributes(self) -> set[str]:
        return {node.attr for node in ast.walk(self.node) if isinstance(node, ast.Attribute)}


@dataclass
class Source:
    """One of our modules, parsed but not imported."""

    name: str
    raw: bytes
    lines: list[int]  # byte offset of each line's start
    statements: list[Statement] = field(default_factory=list)
    bound: dict[str, Statement] = field(default_factory=dict)
    # Imported from this package: local name -> (module, name or "")
    ours: dict[str, Key] = field(default_factory=dict)
    external: dict[str, set[str]] = field(default_factory=dict)  # local name -> import lines
    fork: Fork | None = None

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        n: ast.expr = node  # type: ignore[assignment]
        return self.at(n.lineno, n.col_offset), self.at(n.end_lineno or 0, n.end_col_offset or 0)


def _file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split(".")[1:])
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return file
    return None


@cache
def read(module: str, fork: Fork | None = None) -> Source:
    """The module as it goes into an exported file, for a fork or for no host.

    Raises ExportError for a module that does not exist.
    """
    file = _file(module)
    if file is None:
        raise ExportError(f"there is no module {module}")
    plain = {**FORK, **dict(fork.own)} if fork else PLAIN
    if module in plain:
        file = Path(__file__).with_name("plain") / plain[module].format(host=fork.host if fork else "")
    raw = simplified(module, file.read_text(), fork).encode()
    pieces = raw.split(b"\n")
    lines = [0]
    for piece in pieces:
        lines.append(lines[-1] + len(piece) + 1)
    source = Source(module, raw, lines, fork=fork)
    for node in ast.parse(raw).body:
        _add(source, node, pieces)
    return source


def _add(source: Source, node: ast.stmt, pieces: list[bytes]) -> None:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        _imports(source.name, node, source.ours, source.external)
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    while first > 1 and pieces[first - 2].startswith(b"#"):
        first -= 1
    names = tuple(_bound_names(node))
    end = source.lines[node.end_lineno or 0] - 1  # the whole last line, with its comment
    statement = Statement(node, names, source.at(first, 0), end)
    source.statements.append(statement)
    source.bound.update(dict.fromkeys(names, statement))


def _bound_names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        stored = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        return [n.id for n in stored if isinstance(n.ctx, ast.Store)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [a.asname or a.name.partition(".")[0] for a in node.names]
    if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.ExceptHandler)):
        return [name for child in ast.iter_child_nodes(node) for name in _bound_names(child)]
    return []


def _imports(
    module: str, node: ast.Import | ast.ImportFrom, ours: dict[str, Key], external: dict[str, set[str]]
) -> bool:
    """Sort an import's names into ours and external; True if it is an import of this package."""
    if isinstance(node, ast.Import):
        for a in node.names:
            line = f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
            external.setdefault(a.asname or a.name.partition(".")[0], set()).add(line)
        return False
    parts = module.split(".")
    if node.level:
        package = parts if (_file(module) or ROOT).name == "__init__.py" else parts[:-1]
        parent = package[: len(package) - node.level + 1]
        origin = ".".join([*parent, *([node.module] if node.module else [])])
    else:
        origin = node.module or ""
    if origin.partition(".")[0] != PACKAGE:
        if origin != "__future__":
            for a in node.names:
                line = f"from {origin} import {a.name}" + (f" as {a.asname}" if a.asname else "")
                external.setdefault(a.asname or a.name, set()).add(line)
        return False
    for a in node.names:
        inner = f"{origin}.{a.name}"
        ours[a.asname or a.name] = (inner, "") if _file(inner) else (origin, a.name)
    return True


@dataclass
class Use:
    """A byte range of a statement that refers to a definition outside it."""

    start: int
    end: int
    key: Key | None  # None: an import of this package inside a function, which becomes `pass`
    eager: bool = True  # the module that it names must come before


class Uses(ast.NodeVisitor):
    """Collect the global names that a statement uses, by Python's scoping rules."""

    def __init__(self, source: Source):
        self.source = source
        self.uses: list[Use] = []
        self.external: set[str] = set()
        self.called: set[Key] = set()  # ops by torch.ops.fastkernels.NAME: needed, but not rewritten here
        self.hidden: list[set[str]] = []
        self.ours: list[dict[str, Key]] = [source.ours]

    def add(self, node: ast.AST, key: Key) -> None:
        self.uses.append(Use(*self.source.span(node), origin(*key, self.source.fork), eager=not self.hidden))

    def meaning(self, name: str) -> Key | None:
        """Return the definition that a name refers to here, if it is one of this package."""
        for inner in reversed(self.ours[1:]):
            if name in inner:
                return inner[name]
        if any(name in scope for scope in self.hidden):
            return None
        if name in self.source.ours:
            return self.source.ours[name]
        return (self.source.name, name) if name in self.source.bound else None

    def visit_Name(self, node: ast.Name) -> None:
        key = self.meaning(node.id)
        if key is not None and not key[1]:
            raise ExportError(
                f"{self.source.name}:{node.lineno}: the module {key[0]} is used as a value; export needs MODULE.NAME"
            )
        if key is not None:
            self.add(node, key)
        elif node.id in self.source.external and not any(node.id in scope for scope in self.hidden):
            self.external.add(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        key = self._module_attribute(node) or self._run_of_an_op(node)
        if key is not None:
            self.add(node, key)
            return
        module = registry.op_modules().get(node.attr)
        if module is not None and ast.unparse(node.value) == f"torch.ops.{PACKAGE}":
            self.called.add(origin(module, node.attr, self.source.fork))
        self.generic_visit(node)

    def _module_attribute(self, node: ast.Attribute) -> Key | None:
        """`module.NAME`, `registry.op_module("op").NAME` and `registry.get("op").op` as the name itself."""
        value = node.value
        if isinstance(value, ast.Name):
            key = self.meaning(value.id)
            return (key[0], node.attr) if key is not None and not key[1] else None
        if not (
            isinstance(value, ast.Call) and len(value.args) == 1 and isinstance(value.args[0], ast.Constant)
        ):
            return None
        called = self._called(value.func)
        op = str(value.args[0].value)
        if called == (f"{PACKAGE}.core.registry", "op_module"):
            return registry.op_modules()[op], node.attr
        if called == (f"{PACKAGE}.core.registry", "get") and node.attr in ("op", "reference"):
            return registry.op_modules()[op], op if node.attr == "op" else "reference"
        return None

    def _run_of_an_op(self, node: ast.Attribute) -> Key | None:
        """`op.run` as the function that runs the op without torch's dispatcher."""
        key = self.meaning(node.value.id) if isinstance(node.value, ast.Name) else None
        if key is None or node.attr != "run" or not key[1]:
            return None
        module, name = origin(*key, self.source.fork)
        return (module, f"_run_{name}") if f"_run_{name}" in read(module, self.source.fork).bound else None

    def _called(self, node: ast.expr) -> Key | None:
        if isinstance(node, ast.Name):
            return self.meaning(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            key = self.meaning(node.value.id)
            return (key[0], node.attr) if key is not None and not key[1] else None
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _imports(self.source.name, node, self.ours[-1], {}):
            self.uses.append(Use(*self.source.span(node), None))

    def visit_Global(self, node: ast.Global) -> None:
        start, end = self.source.span(node)
        at = start + len("global ")
        for name in node.names:  # names are separated by commas, in order
            at = self.source.raw.index(name.encode(), at, end)
            self.uses.append(Use(at, at + len(name.encode()), (self.source.name, name)))
            at += len(name.encode())

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for outer in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(outer)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a]
        for annotation in (*(a.annotation for a in arguments), node.returns):
            if annotation is not None:
                self.visit(annotation)
        self._inside({a.arg for a in arguments} | _locals(node.body), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for outer in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(outer)
        a = node.args
        names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x}
        self._inside(names, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outer in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
            self.visit(outer)
        for item in node.body:  # a class body hides nothing inside its methods
            if isinstance(item, ast.AnnAssign):
                self.visit(item.annotation)
                if item.value is not None:
                    self.visit(item.value)
            elif isinstance(item, ast.Assign):
                self.visit(item.value)
            else:
                self.visit(item)

    def _inside(self, names: set[str], body: list) -> None:
        self.hidden.append(names)
        self.ours.append({})
        for item in body:
            self.visit(item)
        self.hidden.pop()
        self.ours.pop()


def _locals(body: list[ast.stmt]) -> set[str]:
    """Names that a function's body binds itself (nested functions' own names left to them)."""
    found: set[str] = set()
    free: set[str] = set()
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, ast.Global):
            free.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if not isinstance(node, ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))
    return found - free


def origin(module: str, name: str, fork: Fork | None = None) -> Key:
    """Where a name of ours is defined, re-exports followed."""
    if fork and name == "refuse" and module == f"{PACKAGE}.overrides.kit.fp8":
        module = f"{PACKAGE}.overrides.routing.arguments"
    source = read(module, fork)
    while name not in source.bound and name in source.ours and source.ours[name][1]:
        module, name = source.ours[name]
        source = read(module, fork)
    if name not in source.bound:
        raise ExportError(f"{module} defines no {name!r}")
    return module, name
