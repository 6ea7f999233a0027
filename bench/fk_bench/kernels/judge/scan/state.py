"""State that a function keeps between calls: tensors by address, identity or value, and counts of calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TypeGuard

from fk_bench.kernels.judge.scan.tree import FUNCTIONS, Tree, children

IDENTITY = ("data_ptr", "untyped_storage", "item", "tolist", "getvalue")
VALUES = ("item", "tolist", "getvalue")  # the last: of printed values
_ROUNDS = 4  # a = x.data_ptr(); b = a; c = b; d = c


def constant_tables(tree: Tree) -> frozenset[str]:
    """Names of tables that the file only reads: literal dictionaries of its top level, such as tile sizes by width."""
    found = {
        target.id
        for node in tree.module.body
        if isinstance(getattr(node, "value", None), ast.Dict)
        for target in targets(node)
        if isinstance(target, ast.Name)
    }
    uses = [n for n in tree.nodes if isinstance(n, ast.Name) and n.id in found]
    stored = [n.id for n in uses if isinstance(n.ctx, ast.Store)]
    return frozenset(
        found
        - {name for name in stored if stored.count(name) > 1}
        - {n.id for n in uses if isinstance(n.ctx, ast.Load) and not _only_read(n, tree)}
    )


def _only_read(name: ast.Name, tree: Tree) -> bool:
    """Whether this use of a table is a look-up: TABLE[key], TABLE.get(key), key in TABLE."""
    parent = tree.parents.get(id(name))
    if isinstance(parent, ast.Subscript):
        return parent.value is name and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("get", "items", "keys", "values")
    return isinstance(parent, ast.Compare)


def keys(function: ast.AST, constants: frozenset[str] = frozenset()) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, pattern, reason) where a property that identifies a tensor is used for a lookup.

    function   an outermost one: functions inside it see its names
    constants  tables that are only read: the integer that a tensor of one element holds may be looked up in them, and
               in constants that are written at the place of the look-up
    """
    nodes = list(ast.walk(function))
    known: dict[str, str] = {}  # local name: the property of a tensor that it holds
    for _ in range(_ROUNDS):
        before, identity = dict(known), _Identity(known)
        for node in nodes:
            for target in targets(node):
                if isinstance(target, ast.Name) and (what := identity(getattr(node, "value", None))):
                    known[target.id] = what
        if known == before:
            break
    identity = _Identity(known)
    for node in nodes:
        for key, values_too in _looked_up(node, identity):
            if _is_scalar(key) and (_table(node) in constants or _is_new(node)):
                continue
            what = identity(key)
            if what in VALUES and values_too:
                yield node, "value-cache", f"{what}() of a tensor is used as a key"
            elif what and what not in VALUES:
                yield (
                    node,
                    "pointer-cache",
                    f"{what} of a tensor is used as a key, although its values may have changed",
                )


def _is_scalar(key: ast.AST) -> bool:
    """Whether a key is int(n.item()): the value of a tensor of one element, not of one that was picked or reduced."""
    call = (
        key.args[0]
        if isinstance(key, ast.Call) and getattr(key.func, "id", "") == "int" and key.args
        else None
    )
    method = call.func if isinstance(call, ast.Call) else None
    return isinstance(method, ast.Attribute) and method.attr == "item" and isinstance(method.value, ast.Name)


def _is_new(node: ast.AST) -> bool:
    """Whether a look-up is in constants that are written there: {1: 64}.get(key), key in (1, 2)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        written = node.func.value
    elif isinstance(node, ast.Compare):
        written = node.comparators[0]
    else:
        return False
    if isinstance(written, ast.Dict):
        return all(isinstance(part, ast.Constant) for part in (*written.keys, *written.values))
    return isinstance(written, (ast.Set, ast.Tuple, ast.List)) and all(
        isinstance(part, ast.Constant) for part in written.elts
    )


def _table(node: ast.AST) -> str:
    """The name of the table in TABLE[key], TABLE.get(key) and `key in TABLE`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _root(node.func.value)
    if isinstance(node, ast.Compare):
        return _root(node.comparators[0])
    return _root(node)


class _Identity:
    """The identifying property of a tensor in an expression ('id', 'data_ptr', '_version', 'item', ...), or ''.

    Each node is looked at once. A name that becomes known later counts in the next _Identity.
    """

    def __init__(self, known: dict[str, str]):
        self.known = known
        self.seen: dict[int, str] = {}

    def __call__(self, node: ast.AST | None) -> str:
        if node is None:
            return ""
        if id(node) not in self.seen:
            self.seen[id(node)] = self._of(node)
        return self.seen[id(node)]

    def _of(self, node: ast.AST) -> str:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd)):
            return ""  # the alignment of an address
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        if isinstance(node, ast.Attribute) and node.attr == "_version":
            return "_version"
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in IDENTITY or (name == "id" and node.args):
                return name
        for child in children(node):
            if what := self(child):
                return what
        return ""


def _looked_up(node: ast.AST, identity: _Identity) -> Iterator[tuple[ast.AST, bool]]:
    """Keys of lookups, and whether a tensor's value counts as one there: as an index into a tensor it does not."""
    if isinstance(node, ast.Subscript):
        yield node.slice, False
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("get", "setdefault", "pop", "add"):
            yield from ((a, True) for a in node.args[:1])
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        yield node.left, True
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
        sides = [node.left, *node.comparators]
        if not all(map(identity, sides)):  # two tensors of one call may be compared
            yield from ((side, False) for side in sides)


def uninitialized(function: ast.AST, is_empty: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """Nodes of an outermost function where memory from torch.empty is returned without a write.

    Fake (shape) functions are exempt.
    """
    used: set[str] = set()  # names that a return statement reads, all of them plainly
    written: set[str] = set()  # names read elsewhere, or as an argument of a call, which may write to them
    empties: list[ast.AST] = []
    waiting = [(function, False, False)]
    while waiting:
        node, returned, called = waiting.pop()
        name = getattr(node, "name", "")
        if isinstance(node, FUNCTIONS) and ("fake" in name or "empty" in name):
            continue
        returned = returned or (isinstance(node, ast.Return) and node.value is not None)
        called = called or (returned and isinstance(node, ast.Call))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            (used if returned and not called else written).add(node.id)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and is_empty(value.func):
            empties.append(node)
        waiting += [(child, returned, called) for child in children(node)]
    for node in empties:
        if isinstance(node, ast.Return):
            yield node
        if any(getattr(target, "id", "") in used - written for target in targets(node)):
            yield node


def counters(tree: Tree, names: Callable[[ast.AST], frozenset[str]]) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, pattern, reason) for numbers that outlive a call, are incremented in it, and are used in a condition."""
    body = tree.module.body
    lasting = {t.id for n in body for t in targets(n) if isinstance(t, ast.Name)}
    lasting |= {n.name for n in body if isinstance(n, (*FUNCTIONS, ast.ClassDef))}
    counted: dict[int, tuple[ast.AST, ast.AST]] = {}
    decide: set[int] = set()
    for function in tree.outermost:
        shared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
        waiting = [(function, False)]
        while waiting:
            node, decides = waiting.pop()
            if decides and isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                decide.add(tree.structures[id(node)])
            if isinstance(node, ast.AugAssign):
                root, plain = _root(node.target), isinstance(node.target, ast.Name)
                own = root == "self" and isinstance(node.value, ast.Constant)
                if root in shared or own or (not plain and root in lasting):
                    counted[tree.structures[id(node.target)]] = node, node.target
            elif _is_next(node, names) and _root(node.args[0]) in lasting:
                yield node, "call-counting", f"{tree.text(node, 40)} counts the calls"
            decides = decides or isinstance(node, (ast.Compare, ast.BoolOp))
            test = node.test if isinstance(node, (ast.If, ast.IfExp, ast.While)) else None
            waiting += [(child, decides or child is test) for child in children(node)]
    for number, (node, target) in counted.items():
        if number in decide:
            reason = f"{tree.text(target)} counts the calls, and decides what one does"
            yield node, "call-counting", reason


def _is_next(node: ast.AST, names: Callable[[ast.AST], frozenset[str]]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and bool(node.args) and "next" in names(node.func)


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """The targets that a statement assigns to (or deletes)."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        for target in node.targets:
            yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else (target,)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        yield node.target
