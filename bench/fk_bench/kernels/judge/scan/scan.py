"""A static scan of a candidate's file, before any of it runs: the first filter, not the only one.

It finds what no kernel needs: other processes and threads, access to files and frames, patched clocks, caches of
results, the library that the candidate is compared with. Names are followed through imports and assignments, by scope.
Code that hides from the scan still has to pass the judge.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from fastkernels.core import registry
from fastkernels.core.candidate import MODULES
from fk_bench.core.terminal.text import printable
from fk_bench.kernels.judge.scan import parts, rules, state
from fk_bench.kernels.judge.scan.ownership import PlaceKind, locate
from fk_bench.kernels.judge.scan.scopes import MAX_NAME, Scopes
from fk_bench.kernels.judge.scan.state import targets
from fk_bench.kernels.judge.scan.tree import FUNCTIONS, Function, Refused, Tree, children
from fk_bench.kernels.judge.scan.unused import without_unused

REJECT, WARN = "reject", "warn"
_MAKE_TEXT = ("join", "format", "decode", "replace", "translate", "strip", "lower")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, *FUNCTIONS)
_MAX_REASONS = 20


@dataclass(frozen=True, order=True)
class Finding:
    """One finding. `severity` is 'reject' (the candidate is not run) or 'warn' (shown with its result)."""

    line: int
    pattern: str
    reason: str
    severity: str = REJECT

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason} ({self.pattern})"


def scan(path: Path, op: str, alone: bool = True) -> list[Finding]:
    """The findings in the candidate's file for that op, by line; none if it is not Python, because it will not load.

    alone: no other file of the candidate imports its functions. Raises OSError for a file that cannot be read.
    """
    try:
        tree = Tree.read(path, lambda module: without_unused(module, _entries(op) if alone else None))
    except Refused as refused:
        return [Finding(1, refused.pattern, str(refused))]
    except (SyntaxError, ValueError):
        return []
    try:
        visitor = _Visitor(op, tree)
        visitor.visit(tree.module)
    except Refused as refused:
        return [Finding(1, refused.pattern, str(refused))]
    except (RecursionError, MemoryError):
        return [Finding(1, "unreadable", "the file takes too much memory to be read")]
    return sorted(visitor.found)


def _entries(op: str) -> frozenset[str]:
    """Names that a caller looks up in the file."""
    classes = {t.cls for t in registry.get(op).targets} if registry.known(op) else set()
    return frozenset((op, op.replace(".", "_"), *op.split("."), *classes))


def rejections(findings: list[Finding]) -> str:
    """The reasons to reject the candidate in one line; empty if there are none."""
    reasons = [printable(str(f)) for f in findings if f.severity == REJECT]
    more = [f"and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    return "; ".join(reasons[:_MAX_REASONS] + more)


class _Visitor(ast.NodeVisitor):
    def __init__(self, op: str, tree: Tree):
        self.op = op
        self.tree = tree
        self.found: set[Finding] = set()
        self.in_function = 0
        # A module of several ops has no kernel of its own: the ops that it calls are judged with it.
        self.composed = registry.known(op) and registry.get(op).op is None
        self.inherited: set[str] = set()  # calls of our classes whose subclasses here have calls of their own
        self.names = Scopes(tree.module).names
        self.hits: dict[str, set[tuple[str, str]]] = {}  # dotted name: what its use means
        self.own: dict[str, tuple[str, str] | None] = {}  # the same, if it is ours
        heads = [n.body[0] for n in tree.nodes if isinstance(n, _WITH_DOCSTRING) and n.body]
        self.docstrings = {id(n.value) for n in heads if isinstance(n, ast.Expr)}
        self.sized = tree.containing(_is_size)
        self.raising = tree.containing(lambda n: isinstance(n, ast.Raise))
        self.looks_up = any(map(self._looks_up, tree.nodes))
        self.fields = self._fields()
        self.parts = parts.harmless(tree)
        constants = state.constant_tables(tree)
        for node, pattern, reason in state.counters(tree, self.names):
            self.note(node, pattern, reason)
        for function in tree.outermost:
            for node, pattern, reason in state.keys(function, constants):
                self.note(node, pattern, reason)
            for node in state.uninitialized(function, lambda n: not self.names(n).isdisjoint(rules.EMPTY)):
                self.note(node, "uninitialized", "memory from torch.empty is returned as it is", WARN)

    def note(self, node: ast.AST, pattern: str, reason: str, severity: str = REJECT) -> None:
        self.found.add(Finding(getattr(node, "lineno", 1), pattern, reason, severity))

    def look_up(self, node: ast.AST, table: dict[str, str], name: str, severity: str = REJECT) -> bool:
        hit = rules.find(table, name)
        if hit is not None:
            self.note(node, *hit, severity)
        return hit is not None

    # names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._import(node, f"{(node.module or '')[:MAX_NAME]}.{alias.name}")

    def _import(self, node: ast.AST, name: str) -> None:
        name = name[:MAX_NAME]
        if name in rules.ALLOWED_IMPORTS or name in self.parts:
            return
        if not self.look_up(node, rules.IMPORTS, name):
            self._note_use(node, name)
        if name.startswith(MODULES):
            self.note(node, "module-reach", f"{name} is another candidate, which is scanned alone")
        place = locate(name)
        if place.kind is PlaceKind.OUTSIDE:
            return
        if place.kind is PlaceKind.PRODUCTION:
            self.note(node, "baseline-library", rules.REASONS["baseline-library"].format(name))
        elif name.endswith(".*") or (place.name and self._is_own_op(name)):
            self.note(node, "own-op", f"{name} contains the op that the candidate replaces")
        elif place.kind is PlaceKind.HELPER:
            self.note(node, "own-helper", f"{name} is a part of our own kernels", WARN)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node)
        if not self._is_field(node):
            self._reached(node, node.attr)
        self._strings(node, node.attr)
        if not self.names(node):
            self.visit(node.value)
        elif not isinstance(node.value, ast.Name):
            self._inner(node.value)

    def _inner(self, node: ast.AST) -> None:
        """The strings of the attributes inside a dotted name, of which only the whole is looked up."""
        while isinstance(node, ast.Attribute):
            self._strings(node, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            self.visit(node)

    def _use(self, node: ast.AST) -> None:
        for name in self.names(node):
            self._note_use(node, name)
            if name not in self.own:
                self.own[name] = self._of_ours(name)
            if (hit := self.own[name]) is not None:
                self.note(node, *hit)

    def _of_ours(self, name: str) -> tuple[str, str] | None:
        if locate(name).kind is PlaceKind.PRODUCTION:
            return "baseline-library", rules.REASONS["baseline-library"].format(name)
        if self._is_own_op(name) or name.split(".")[:4] == ["torch", "ops", "fastkernels", self.op]:
            return "own-op", f"{name} is the op that the candidate replaces"
        return None

    def _note_use(self, node: ast.AST, name: str) -> None:
        if name not in self.hits:
            self.hits[name] = rules.used(name)
        for pattern, reason in self.hits[name]:
            self.note(node, pattern, reason)

    def _reached(self, node: ast.AST, name: str) -> None:
        """An attribute of anything, or its name in a string."""
        if name in rules.REACHED:
            self.note(node, "module-reach", rules.REASONS["module-reach"].format(f"`{name}`"))
        self.look_up(node, rules.ATTRIBUTES, name)

    def _looks_up(self, node: ast.AST) -> bool:
        """Whether a node can look up an attribute or a module by a string, other than by a literal `getattr`."""
        if isinstance(node, ast.Call) and "getattr" in self.names(node.func):
            return False  # a literal name is followed; all others are found below, as names of `getattr`
        if isinstance(node, ast.Name) and node.id == "getattr":
            call = self.tree.parents.get(id(node))
            literal = (
                isinstance(call, ast.Call) and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
            )
            return not (literal and call.func is node)  # type: ignore[union-attr]
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.alias):
            name = node.name.rpartition(".")[2]
        return name in rules.LOOK_UPS

    def _names_attribute(self, node: ast.Constant) -> bool:
        call = self.tree.parents.get(id(node))
        return isinstance(call, ast.Call) and "getattr" in self.names(call.func) and node in call.args[1:2]

    def _fields(self) -> set[str]:
        """Attributes that the file gives its own objects, such as `self.os = 3`; those that hold a module are none."""
        found: set[str] = set()
        modules: set[str] = set()
        for node in self.tree.nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                in_class = isinstance(self.tree.parents.get(id(node)), ast.ClassDef)
                for target in targets(node):
                    own = isinstance(target, ast.Attribute) and self._is_self(target.value)
                    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                    if own or (in_class and isinstance(target, ast.Name)):
                        values = self.names(node.value)
                        parts = {part for value in values for part in value.split(".")}
                        (modules if parts & rules.REACHED or (not own and values) else found).add(name)
        return found - modules

    def _is_self(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in ("self", "cls") and self.names(node) <= {node.id}

    def _is_field(self, node: ast.Attribute) -> bool:
        return node.attr in self.fields and self._is_self(node.value)

    def _is_own_op(self, name: str) -> bool:
        """Whether a dotted name leads to what the candidate replaces: the op's kernel, or a class that calls it."""
        place = locate(name)
        if self.composed or self.op not in place.ops:
            return False
        is_reference = (
            place.kind is PlaceKind.OP and place.name == "reference" and name.endswith(".reference")
        )
        return not is_reference and not place.is_record

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, (str, bytes)) and id(node) not in self.docstrings:
            self._strings(node, str(node.value))
            looked_up = self.looks_up or self._names_attribute(node)
            if looked_up and isinstance(node.value, str) and len(node.value) <= MAX_NAME:
                for part in node.value.split("."):  # operator.attrgetter("sys.modules"), vars(m)["sys"]
                    if part in rules.REACHED or part in rules.HIDDEN:
                        self._reached(node, part)
            if len(node.value) > 4096:
                self.note(node, "big-constant", f"a constant of {len(node.value)} characters", WARN)

    def _strings(self, node: ast.AST, text: str) -> None:
        for part, pattern in rules.SUBSTRINGS.items():
            if part in text:
                self.note(node, pattern, rules.REASONS[pattern].format(repr(text[:60])))

    # calls

    def visit_Call(self, node: ast.Call) -> None:
        for name in self.names(node.func):
            self._called(node, name)
        method = node.func if isinstance(node.func, ast.Attribute) else None
        if method is not None and method.attr in self.inherited and _is_super(method.value):
            self.note(node, "own-op", f"super().{method.attr} is what the candidate replaces")
        self._downcast(node)
        self.generic_visit(node)

    def _called(self, node: ast.Call, name: str) -> None:
        self.look_up(node, rules.CALLS, name)
        self.look_up(node, rules.WARN_CALLS, name, WARN)
        if name in ("setattr", "delattr", "vars", "object.__setattr__") and node.args:
            for owner in self.names(node.args[0]):
                self._assigned(node, owner, f"{name}({owner}, ...)")
        elif name == "vars":  # of the file itself: names could get other meanings
            self.note(node, "inspection", rules.REASONS["inspection"].format("vars()"))
        elif name == "getattr" and len(node.args) > 1:
            self._getattr(node)
        elif name == "os.getenv" or name.startswith("os.environ."):
            reads = name in ("os.getenv", "os.environ.get") and bool(node.args)
            sets = name in ("os.environ.setdefault", "os.environ.pop") and bool(node.args)
            given = node.args[1] if name == "os.environ.setdefault" and len(node.args) > 1 else None
            self._environment(node, node.args[0] if reads or sets else None, sets, given)
        elif name.startswith("fastkernels.core.registry."):
            first = node.args[0] if node.args else None
            if not isinstance(first, ast.Constant) or first.value == self.op:
                self.note(node, "own-op", f"{self.tree.text(node)} gives the op that the candidate replaces")

    def _getattr(self, node: ast.Call) -> None:
        self._use(node)
        name = node.args[1]
        made = (
            isinstance(name, ast.Call)
            and isinstance(name.func, ast.Attribute)
            and name.func.attr in _MAKE_TEXT
        )
        computed = made or isinstance(name, (ast.BinOp, ast.JoinedStr))
        for owner in {inner.split(".")[0] for inner in self.names(node.args[0])}:
            strict = owner in ("os", "sys", "builtins", "time") and not isinstance(name, ast.Constant)
            if owner in rules.PROTECTED and (computed or strict):
                reason = f"getattr({owner}, ...) with a computed name hides what it reads"
                self.note(node, "dynamic-code", reason)

    def _downcast(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        types = {
            a.attr for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Attribute)
        }
        cast = method in ("to", "type", "empty", "zeros") and types & set(rules.LOW_PRECISION)
        if cast or method in ("half", "bfloat16"):
            self.note(
                node, "downcast", f"{self.tree.text(node.func, 40)}(...) may compute in a smaller type", WARN
            )

    def _environment(
        self, node: ast.AST, key: ast.AST | None, sets: bool = False, given: ast.AST | None = None
    ) -> None:
        """given: the value that the variable gets, if it is written there."""
        name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        value = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""
        compiler = name in rules.COMPILERS and (not sets or bool(rules.COMPILER.fullmatch(value)))
        if sets and (compiler or name.startswith(rules.BUILD_ENVIRONMENT)):
            self.note(node, "global-setting", rules.REASONS["global-setting"].format(name), WARN)
        elif sets or not (compiler or name.startswith(rules.ENVIRONMENT)):
            self.note(node, "files", f"os.environ[{name or '...'}] is not among what the kernel was given")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if "os.environ" in self.names(node.value):
            sets = isinstance(node.ctx, ast.Store)
            key = None if isinstance(node.ctx, ast.Del) else node.slice
            around = self.tree.parents.get(id(node))
            alone = isinstance(around, ast.Assign) and node in around.targets
            self._environment(node, key, sets, around.value if alone else None)  # type: ignore[union-attr]
        self.generic_visit(node)

    # assignments

    def _assign(self, node: ast.AST) -> None:
        for target in targets(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                owner = target if isinstance(target, ast.Attribute) else target.value
                for name in self.names(owner):
                    self._assigned(node, name, self.tree.text(target))
        self.generic_visit(node)

    visit_Assign = visit_AugAssign = visit_AnnAssign = visit_Delete = _assign

    def _assigned(self, node: ast.AST, name: str, text: str) -> None:
        if name.startswith(rules.SETTINGS):
            self.note(node, "global-setting", rules.REASONS["global-setting"].format(text), WARN)
        elif name.split(".")[0] in rules.PROTECTED and not name.startswith("os.environ"):
            self.note(node, "patching", rules.REASONS["patching"].format(text))

    # functions, classes, errors

    def visit_FunctionDef(self, node: Function) -> None:
        if node.name in ("__torch_function__", "__torch_dispatch__"):
            self.note(node, "lazy-tensor", rules.REASONS["lazy-tensor"].format(node.name))
        decorators = {
            name for d in node.decorator_list for name in self.names(d.func if isinstance(d, ast.Call) else d)
        }
        if decorators & {"functools.cache", "functools.lru_cache"}:
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                if _names_tensor(arg):
                    reason = f"{node.name} is cached by the tensor {arg.arg}, not by its values"
                    self.note(node, "pointer-cache", reason)
        self.in_function += 1
        self.generic_visit(node)
        self.in_function -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in {name for expression in node.bases for name in self.names(expression)}:
            if base in ("torch.Tensor", "torch._tensor.Tensor") or base.endswith(
                ("DispatchMode", "FunctionMode")
            ):
                self.note(node, "lazy-tensor", rules.REASONS["lazy-tensor"].format(f"{node.name}({base})"))
        own = {item.name for item in node.body if isinstance(item, FUNCTIONS)}
        bases = set(map(id, node.bases))
        for part in children(node):
            # A subclass of ours may inherit weights and loaders if it has its own call.
            ours = [n for n in self.names(part) if self._is_own_op(n)] if id(part) in bases else []
            calls = frozenset().union(*(locate(n).calls for n in ours))
            if own & calls:
                self.inherited |= calls
            else:
                self.visit(part)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(k is None or self.names(k) & {"Exception", "BaseException"} for k in kinds)
        if broad and id(node) not in self.raising:
            what = f"`except {self.tree.text(node.type)}`" if node.type is not None else "a bare `except`"
            reason = f"{what} continues with something else if the kernel fails"
            self.note(node, "fallback", reason, REJECT if self.in_function else WARN)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        sized = any(id(side) in self.sized for side in sides)
        if (
            sized
            and any(map(_literal, sides))
            and isinstance(node.ops[0], (ast.Eq, ast.In, ast.NotEq, ast.NotIn))
        ):
            self.note(node, "literal-shape", f"`{self.tree.text(node)}`: other sizes take another path", WARN)
        self.generic_visit(node)

    def _container(self, node: ast.List | ast.Tuple | ast.Dict) -> None:
        size = len(node.values if isinstance(node, ast.Dict) else node.elts)
        if size > 256:
            self.note(node, "big-constant", f"a table of {size} constants", WARN)
        self.generic_visit(node)

    visit_List = visit_Tuple = visit_Dict = _container


def _names_tensor(arg: ast.arg) -> bool:
    """Whether an argument is a tensor by its annotation, or without one by its name."""
    if arg.annotation is None:
        return "Tensor" in arg.arg
    words = (getattr(n, "id", getattr(n, "attr", getattr(n, "value", ""))) for n in ast.walk(arg.annotation))
    return any(isinstance(word, str) and "Tensor" in word for word in words)


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _is_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "shape"
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("size", "numel")
    )


def _literal(node: ast.AST) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts) and all(map(_literal, node.elts))
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1
