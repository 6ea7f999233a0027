"""Dotted names that a name in a file may stand for, by Python's scopes: several if several assignments reach it.

The rule is safe rather than exact. Bindings in branches, loops and other functions all count. Only a binding among the
plain statements of a body, which runs each time, ends the earlier ones of its scope for the code below it.
"""

from __future__ import annotations

import ast
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fk_bench.kernels.judge.scan.tree import FUNCTIONS, Function, Refused, children

MAX_NAME = 200  # characters of a dotted name; no entry of the rules is as long
_ROUNDS = 12  # of names passed on against the order of the file: b = a, and below it a = torch
_MOST = 256  # assignments that one use of a name may see
_MEANINGS = 32  # dotted names that an expression may have
_STARS = 16  # modules of which all names are imported
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TANGLED = "a name stands for too many things to be followed: assign it less often"
_NOTHING: frozenset[str] = frozenset()


@dataclass
class _Binding:
    value: ast.AST | None  # the expression, if it may have a dotted name
    names: frozenset[str]  # what it stands for, as far as known
    at: int  # order in the file


@dataclass
class _Scope:
    kind: str  # module, class, function or comprehension
    parent: _Scope | None
    # in the order of the file; `late` ones, of other functions, may run at any time
    bindings: dict[str, list[_Binding]] = field(default_factory=dict)
    late: dict[str, list[_Binding]] = field(default_factory=dict)
    plain: dict[str, list[int]] = field(
        default_factory=dict
    )  # of statements that run whenever their scope does
    deleted: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)  # name: global or nonlocal


class Scopes:
    """The dotted names of the names of a module. Raises Refused for a file in which they cannot be followed."""

    def __init__(self, module: ast.Module):
        self._module = _Scope("module", None)
        self._stars: list[str] = []  # modules of which all names are imported
        self._uses: dict[int, tuple[_Scope, int]] = {}
        self._valued: list[_Binding] = []
        self._known: dict[int, frozenset[str]] = {}
        self._order = 0
        self._elsewhere: list[tuple[_Scope, str, _Binding | None]] = []  # None: deleted
        self._body(module.body, self._module)
        for scope, name, binding in self._elsewhere:
            owner = _owner(scope, name, self._module)
            if binding is None:
                owner.deleted.add(name)
            else:
                owner.late.setdefault(name, []).append(binding)
        self._settle()

    def names(self, node: ast.AST | None) -> frozenset[str]:
        """The dotted names that an expression may have, as far as known."""
        if node is None:
            return _NOTHING
        if id(node) not in self._known:
            found = frozenset(name[:MAX_NAME] for name in self._of(node))
            if len(found) > _MEANINGS:
                raise Refused("unreadable", _TANGLED)
            self._known[id(node)] = found
        return self._known[id(node)]

    def _of(self, node: ast.AST) -> Iterable[str]:
        if isinstance(node, ast.Name):
            return self._meanings(node)
        if isinstance(node, ast.Attribute):
            end = f".{node.attr}"  # `frame = frame.f_back` in a loop gives one name, not ever longer ones
            return {inner if inner.endswith(end) else inner + end for inner in self.names(node.value)}
        if isinstance(node, ast.NamedExpr):
            return self.names(node.value)
        if isinstance(node, ast.IfExp):
            return self.names(node.body) | self.names(node.orelse)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*map(self.names, node.values))
        if isinstance(node, ast.Call) and len(node.args) >= 2 and "getattr" in self.names(node.func):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return {f"{inner}.{name.value}" for inner in self.names(node.args[0])}
        return ()

    def _meanings(self, node: ast.Name) -> set[str]:
        found: set[str] = set()
        for binding, free in self._found(node.id, *self._uses.get(id(node), (self._module, sys.maxsize))):
            found |= {free} if binding is None else binding.names
        return found

    def _found(self, name: str, scope: _Scope, at: int) -> Iterator[tuple[_Binding | None, str]]:
        """The bindings that a use may see, and (None, NAME) for a builtin or a star import."""
        used_in: _Scope | None = scope
        at_scope: _Scope | None = scope
        while at_scope is not None:
            kind = at_scope.shared.get(name)
            if kind == "global":
                at_scope = self._module
            elif kind == "nonlocal" or (at_scope.kind == "class" and at_scope is not used_in):
                at_scope = at_scope.parent
                continue
            if name in at_scope.bindings or name in at_scope.late:
                live, sure = _live(at_scope, name, at)
                if len(live) > _MOST:
                    raise Refused("unreadable", _TANGLED)
                yield from ((b, "") for b in live)
                if sure or at_scope.kind in ("function", "comprehension"):
                    return
            at_scope = at_scope.parent
        for free in (name, *(f"{module}.{name}" for module in self._stars)):
            yield None, free

    def _settle(self) -> None:
        for _ in range(_ROUNDS):
            changed = False
            for binding in self._valued:
                names = self.names(binding.value)
                self._known.clear()
                changed = changed or names != binding.names
                binding.names = names
            if not changed:
                return
        raise Refused("unreadable", _TANGLED)

    # the walk: in the order in which the parts of a statement run

    def _body(self, body: Iterable[ast.stmt], scope: _Scope, plain: bool = True) -> None:
        for statement in body:
            self._walk(statement, scope, plain)

    def _walk(self, node: ast.AST, scope: _Scope, plain: bool = False) -> None:
        self._order += 1
        if isinstance(node, ast.Name):
            self._uses[id(node)] = scope, self._order
            if isinstance(node.ctx, ast.Store):
                self._bind(scope, node.id, plain=plain)
            elif isinstance(node.ctx, ast.Del):
                self._elsewhere.append((scope, node.id, None))
        elif isinstance(node, FUNCTIONS):
            self._function(node, scope, plain)
        elif isinstance(node, ast.Lambda):
            self._walk(node.body, self._parameters(node.args, scope))
        elif isinstance(node, ast.ClassDef):
            for part in (*node.decorator_list, *node.bases, *node.keywords):
                self._walk(part, scope)
            self._body(node.body, _Scope("class", scope))
            self._bind(scope, node.name, plain=plain)
        elif isinstance(node, _COMPREHENSIONS):
            self._comprehension(node, scope)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node, scope, plain)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            self._assign(node, scope, plain)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._walk(node.iter, scope)
            self._loop(node.target, node.iter, scope)
            self._body([*node.body, *node.orelse], scope, False)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            pass  # read at the beginning of the function
        else:
            for name in ("name", "rest"):  # of handlers and patterns
                if isinstance(bound := getattr(node, name, None), str):
                    self._bind(scope, bound)
                    if isinstance(node, ast.ExceptHandler):
                        self._elsewhere.append((scope, bound, None))
            for child in children(node):
                self._walk(child, scope)

    def _function(self, node: Function, scope: _Scope, plain: bool) -> None:
        for part in node.decorator_list:
            self._walk(part, scope)
        inner = self._parameters(node.args, scope)
        if node.returns is not None:
            self._walk(node.returns, scope)
        if not node.decorator_list:  # the body runs after the name is bound
            self._bind(scope, node.name, plain=plain)
        waiting: list[ast.AST] = list(node.body)
        while waiting:
            inside = waiting.pop()
            if isinstance(inside, (ast.Global, ast.Nonlocal)):
                kind = "global" if isinstance(inside, ast.Global) else "nonlocal"
                inner.shared.update(dict.fromkeys(inside.names, kind))
            elif isinstance(inside, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(
                inside, (*FUNCTIONS, ast.ClassDef)
            ):
                waiting += children(inside)
        self._body(node.body, inner)
        if node.decorator_list:
            self._bind(scope, node.name, plain=plain)

    def _parameters(self, args: ast.arguments, scope: _Scope) -> _Scope:
        """A function's scope with its parameters, which may stand for their defaults."""
        for part in children(args):
            for inner in (part.annotation,) if isinstance(part, ast.arg) else (part,):
                if inner is not None:
                    self._walk(inner, scope)
        made = _Scope("function", scope)
        positional = [*args.posonlyargs, *args.args]
        given: list[tuple[ast.arg | None, ast.expr | None]] = [
            *zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
            *((a, None) for a in positional[: len(positional) - len(args.defaults)]),
            (args.vararg, None), (args.kwarg, None),
        ]  # fmt: skip
        for arg, default in given:
            if arg is not None:
                self._bind(made, arg.arg, default)
        return made

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: _Scope
    ) -> None:
        self._walk(node.generators[0].iter, scope)
        inner = _Scope("comprehension", scope)
        for i, generator in enumerate(node.generators):
            if i:
                self._walk(generator.iter, inner)
            self._loop(generator.target, generator.iter, inner)
            for test in generator.ifs:
                self._walk(test, inner)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._walk(part, inner)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: _Scope, plain: bool) -> None:
        module = (node.module or "")[:MAX_NAME] if isinstance(node, ast.ImportFrom) else ""
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for a in node.names:
            if a.name == "*":
                if not relative:
                    self._stars.append(module)
                    if len(self._stars) > _STARS:
                        raise Refused("unreadable", _TANGLED)
                continue
            full = f"{module}.{a.name}" if module else a.name
            if not a.asname and not module:
                full = full.split(".")[0]
            names = _NOTHING if relative else frozenset((full[:MAX_NAME],))
            self._bind(scope, a.asname or full.rpartition(".")[2], None, names, plain)

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr, scope: _Scope, plain: bool) -> None:
        if node.value is not None:
            self._walk(node.value, scope)
        if isinstance(node, ast.AnnAssign):
            self._walk(node.annotation, scope)
        if isinstance(node, ast.NamedExpr):
            late = scope.kind == "comprehension"  # a generator runs when it is read
            while scope.kind == "comprehension" and scope.parent is not None:
                scope = scope.parent
            self._uses[id(node.target)] = scope, self._order
            self._bind(scope, node.target.id, node.value, late=late)
            return
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            if node.value is None and isinstance(target, ast.Name):
                if scope.kind == "function":  # `x: int` makes a name local
                    self._bind(scope, target.id)
                continue
            self._store(target, node.value, scope, plain)

    def _store(self, target: ast.expr, value: ast.AST | None, scope: _Scope, plain: bool) -> None:
        if isinstance(target, ast.Name):
            self._order += 1
            self._uses[id(target)] = scope, self._order
            self._bind(scope, target.id, value, plain=plain)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            alike = len(parts) == len(target.elts) and not any(
                isinstance(p, ast.Starred) for p in (*parts, *target.elts)
            )
            for i, inner in enumerate(target.elts):
                self._store(inner, parts[i] if alike else None, scope, plain)
        elif isinstance(target, ast.Starred):
            self._store(target.value, None, scope, plain)
        else:
            self._walk(target, scope)

    def _loop(self, target: ast.expr, over: ast.expr, scope: _Scope) -> None:
        """A loop's variable, which may stand for each element that is written there."""
        written = over.elts if isinstance(over, (ast.Tuple, ast.List, ast.Set)) else []
        for value in (*written, None):
            self._store(target, value, scope, False)

    def _bind(
        self, scope: _Scope, name: str, value: ast.AST | None = None, names: frozenset[str] = _NOTHING,
        plain: bool = False, late: bool = False,
    ) -> None:  # fmt: skip
        self._order += 1
        value = value if _may_have_names(value) else None
        binding = _Binding(value, names, self._order)
        if value is not None:
            self._valued.append(binding)
        if late or name in scope.shared:
            self._elsewhere.append((scope, name, binding))
            return
        known = scope.bindings.setdefault(name, [])
        if plain:
            scope.plain.setdefault(name, []).append(self._order)
        if value is not None or names or not known:
            known.append(binding)


def _may_have_names(value: ast.AST | None) -> bool:
    if isinstance(value, ast.Call):  # getattr(x, "name")
        return len(value.args) > 1 and isinstance(value.args[1], ast.Constant)
    return isinstance(value, (ast.Name, ast.Attribute, ast.NamedExpr, ast.IfExp, ast.BoolOp))


def _owner(scope: _Scope, name: str, module: _Scope) -> _Scope:
    """The scope that a binding of a name in `scope` is in."""
    shared = scope.shared.get(name)
    if shared == "global":
        return module
    while shared == "nonlocal" and scope.parent is not None and scope.parent.kind != "module":
        scope = scope.parent
        if scope.kind == "function" and scope.shared.get(name) == "global":
            return module
        if scope.kind == "function" and name in scope.bindings:
            break
    return scope


def _live(scope: _Scope, name: str, at: int) -> tuple[list[_Binding], bool]:
    """The bindings that a use at that place may see, and whether the name is surely bound there."""
    found, plain = scope.bindings.get(name, []), scope.plain.get(name, [])
    before = bisect_left(plain, at)
    first = bisect_left(found, plain[before - 1], key=lambda b: b.at) if before else 0
    return [*found[first:], *scope.late.get(name, ())], bool(before) and name not in scope.deleted
