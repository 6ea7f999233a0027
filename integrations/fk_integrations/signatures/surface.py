"""Find what a host's own code uses of a class in addition to its constructor and call, by AST: nothing is imported.

    overridden  methods and attributes that the host's subclasses define anew
    used        those that its subclasses call, and that other code of the host uses on an instance or the class
    reached     those of `overridden` that the call goes through: such a subclass changes the result

Instances are found where the source shows the class: a variable or `self.NAME` that is set to a call of the class (or
of a function that is annotated to return it), an annotated argument, an isinstance test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fk_integrations.signatures.recorder import Sources

Key = tuple[str, str]  # (module, name) of a definition
FIRST = ("self", "cls")
UNIONS = ("Optional", "Union")


class Package:
    """The classes of a host's package, who inherits from whom, and what uses their members."""

    def __init__(self, sources: Sources, host: str, names: Collection[str]):
        """names: of the classes in question. Files without these, or names that stand for them, are not parsed."""
        self.sources = sources
        self.find = lru_cache(maxsize=None)(self._find)
        self.trees: dict[str, ast.Module] = {}
        self.imports: dict[str, dict[str, Key]] = {}
        self.classes: dict[Key, ast.ClassDef] = {}
        unread = {
            file: file.read_text(encoding="utf-8")
            for file in sorted((sources.root / host).rglob("*.py"))
            if not file.name.startswith("modular_")  # transformers generates its model files from these
        }
        wanted, new = set(names), set(names)
        while new:
            mentions = re.compile(rf"\b({'|'.join(sorted(new))})\b")
            files = [file for file, text in unread.items() if mentions.search(text)]
            found = {name for file in files for name in self._read(file, unread.pop(file), wanted)}
            wanted, new = wanted | found, found - wanted
        self.bases = {
            key: [b for e in n.bases if (b := self.named(key[0], e))] for key, n in self.classes.items()
        }
        self.uses: dict[Key, set[str]] = {}
        for name, tree in self.trees.items():
            _Reader(self, name).visit(tree)

    def _read(self, file: Path, text: str, wanted: set[str]) -> set[str]:
        """Parse a file. Return its classes that inherit from a wanted one, and functions that return one."""
        parts = file.relative_to(self.sources.root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return set()
        self.trees[name] = tree
        self.imports[name] = _imports(tree, name, parts[-1] == "__init__")
        own = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        self.classes |= {(name, n.name): n for n in own}
        returned = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.returns is not None]
        return {n.name for n in own if wanted & {ast.unparse(b) for b in n.bases}} | {
            n.name
            for n in returned
            if wanted & set(re.findall(r"\w+", ast.unparse(n.returns)))  # type: ignore[arg-type]
        }

    def _find(self, module: str, name: str) -> Key | None:
        """The definition that a name means in a module, imports inside functions included."""
        found = self.sources.find(module, name)
        if found is None and name in self.imports.get(module, {}):
            found = self.sources.find(*self.imports[module][name])
        return (found[0].name, found[1]) if found is not None else None

    def named(self, module: str, node: ast.expr) -> Key | None:
        return self.find(module, node.id) if isinstance(node, ast.Name) else None

    def annotated(self, module: str, node: ast.expr | None) -> set[Key]:
        """The definitions that an annotation allows: X, X | None, Optional[X], 'X'."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return set()
        if isinstance(node, ast.BinOp):
            return self.annotated(module, node.left) | self.annotated(module, node.right)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in UNIONS:
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return {key for e in inner for key in self.annotated(module, e)}
        found = self.named(module, node) if node is not None else None
        return {found} if found is not None else set()

    def derived(self, key: Key) -> set[Key]:
        """Every class of the package that inherits from this one."""
        found: set[Key] = set()
        todo = [key]
        while todo:
            above = todo.pop()
            new = {k for k, bases in self.bases.items() if above in bases} - found - {key}
            found |= new
            todo += new
        return found

    def surface(self, module: str, name: str) -> dict[str, list[str]]:
        """{"overridden", "used", "reached"} of a class, without the lists that are empty."""
        key, here = (module, name), self.sources.module(module)
        line = [cls for _, cls in self.sources.lineage(here, name)] if here is not None else []
        members = {m for cls in line for m in _members(cls)}
        below = self.derived(key)
        overridden = {m for k in below for m in _defined(self.classes[k])} & members
        used = {m for k in {key, *below} for m in self.uses.get(k, ())}
        used |= {m for k in below for m in _own_uses(self.classes[k])}
        reached = overridden & self._reached(line)
        found = {"overridden": overridden, "used": used & members, "reached": reached}
        found = {kind: {m for m in names if not m.startswith("__")} for kind, names in found.items()}
        return {kind: sorted(names) for kind, names in found.items() if names}

    def _reached(self, line: list[ast.ClassDef]) -> set[str]:
        methods: dict[str, ast.FunctionDef] = {}
        for cls in reversed(line):
            methods |= {n.name: n for n in cls.body if isinstance(n, ast.FunctionDef)}
        todo = [m for m in methods if m == "forward" or m.startswith("forward_")]
        found = set(todo)
        while todo:
            new = _own_uses(methods[todo.pop()]) & methods.keys() - found
            found |= new
            todo += new
        return found


class _Reader(ast.NodeVisitor):
    """Collect the members that a file uses of the package's classes."""

    def __init__(self, package: Package, module: str):
        self.package, self.module = package, module
        self.attributes: list[dict[str, set[Key]]] = []  # of `self`, in the classes around
        self.variables: list[dict[str, set[Key]]] = [{}]  # in the functions around

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        types: dict[str, set[Key]] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    if _is_own(target):
                        types.setdefault(target.attr, set()).update(self.value(inner.value))  # type: ignore[attr-defined]
            elif isinstance(inner, ast.AnnAssign):
                found = self.package.annotated(self.module, inner.annotation)
                if isinstance(inner.target, ast.Name):
                    types.setdefault(inner.target.id, set()).update(found)
                elif _is_own(inner.target):
                    types.setdefault(inner.target.attr, set()).update(found)  # type: ignore[union-attr]
        self.attributes.append(types)
        self.generic_visit(node)
        self.attributes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        a, types = node.args, {}
        for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs):
            types[argument.arg] = self.package.annotated(self.module, argument.annotation)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                types.setdefault(inner.targets[0].id, set()).update(self.value(inner.value))
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and len(inner.args) == 2:
                value, tested = inner.args
                if inner.func.id == "isinstance" and isinstance(value, ast.Name):
                    kinds = tested.elts if isinstance(tested, ast.Tuple) else [tested]
                    found = {key for e in kinds if (key := self.package.named(self.module, e))}
                    types.setdefault(value.id, set()).update(found)
        self.variables.append(types)
        self.generic_visit(node)
        self.variables.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for key in self.value(node.value) | self.itself(node.value):
            self.package.uses.setdefault(key, set()).add(node.attr)
        self.generic_visit(node)

    def itself(self, node: ast.expr) -> set[Key]:
        found = self.package.named(self.module, node)
        return {found} if found in self.package.classes else set()  # type: ignore[return-value]

    def value(self, node: ast.expr) -> set[Key]:
        """The classes that an expression is an instance of, as far as the source shows."""
        if isinstance(node, ast.Call):
            found = self.package.named(self.module, node.func)
            if found is None:
                return set()
            if found in self.package.classes:
                return {found}
            defined = self.package.sources.module(found[0])
            function = defined.defined.get(found[1]) if defined is not None else None
            return self.package.annotated(found[0], getattr(function, "returns", None))
        if isinstance(node, ast.Name):
            return next((types[node.id] for types in reversed(self.variables) if node.id in types), set())
        if _is_own(node):
            return next((t[node.attr] for t in reversed(self.attributes) if node.attr in t), set())  # type: ignore[attr-defined]
        return set()


def _is_own(node: ast.expr) -> bool:
    """Whether the expression is `self.NAME` or `cls.NAME`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FIRST


def _imports(tree: ast.Module, name: str, package: bool) -> dict[str, Key]:
    """Names that `from` imports bind, anywhere in the file."""
    found: dict[str, Key] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parent = name.split(".") if package else name.split(".")[:-1]
            start = parent[: len(parent) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            found |= {a.asname or a.name: (source, a.name) for a in node.names}
    return found


def _defined(cls: ast.ClassDef) -> set[str]:
    """Methods and attributes that the class's body binds."""
    names = {n.name for n in cls.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for node in cls.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names


def _members(cls: ast.ClassDef) -> set[str]:
    """Names that the class's body binds, and attributes that its methods set."""
    stored = (n for n in ast.walk(cls) if _is_own(n) and isinstance(n.ctx, ast.Store))  # type: ignore[arg-type, attr-defined]
    return _defined(cls) | {n.attr for n in stored}  # type: ignore[attr-defined]


def _own_uses(node: ast.AST) -> set[str]:
    """Members of the instance or its class that the code reads: self.NAME, cls.NAME, super().NAME."""
    return set(_reads(node))


def _reads(node: ast.AST) -> Iterator[str]:
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load):
            above = isinstance(n.value, ast.Call) and ast.unparse(n.value.func) == "super"
            if above or _is_own(n):
                yield n.attr
