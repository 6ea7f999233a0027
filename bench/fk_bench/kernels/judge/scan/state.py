"""State that a function keeps between calls: tensors by address, identity or value, and counts of calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

IDENTITY = ("data_ptr", "untyped_storage", "item", "tolist")
VALUES = ("item", "tolist")


def keys(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, pattern, reason) where a property that identifies a tensor is used for a lookup."""
    known: dict[str, str] = {}  # local name: the property of a tensor that it holds
    for _ in range(2):
        for node in ast.walk(function):
            what = (
                _identity(getattr(node, "value", None), known)
                if next(targets(node), None) is not None
                else ""
            )
            for target in targets(node):
                if what and isinstance(target, ast.Name):
                    known[target.id] = what
    for node in ast.walk(function):
        for key, values_too in _looked_up(node, known):
            what = _identity(key, known)
            if what in VALUES and values_too:
                yield node, "value-cache", f"{what}() of a tensor is used as a key"
            elif what and what not in VALUES:
                yield (
                    node,
                    "pointer-cache",
                    f"{what} of a tensor is used as a key, although its values may have changed",
                )


def _looked_up(node: ast.AST, known: dict[str, str]) -> Iterator[tuple[ast.AST, bool]]:
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
        if not all(_identity(n, known) for n in sides):  # two tensors of one call may be compared
            yield from ((side, False) for side in sides)


def _identity(node: ast.AST | None, known: dict[str, str]) -> str:
    """The identifying property of a tensor in this expression ('id', 'data_ptr', '_version', 'item', ...), or ''."""
    if node is None or (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd))):
        return ""  # the alignment of an address
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and node.attr == "_version":
        return "_version"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in IDENTITY or (name == "id" and node.args):
            return name
    return next((what for child in ast.iter_child_nodes(node) if (what := _identity(child, known))), "")


def uninitialized(function: ast.FunctionDef, is_empty: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """Nodes where memory from torch.empty is returned without a write. Fake (shape) functions are exempt."""
    if "fake" in function.name or "empty" in function.name:
        return
    returns = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
    returned = {id(n) for r in returns for n in ast.walk(r)}
    for node in ast.walk(function):
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Call) or not is_empty(value.func):
            continue
        if isinstance(node, ast.Return):
            yield node
        for target in targets(node):
            uses = [
                n
                for n in ast.walk(function)
                if isinstance(n, ast.Name)
                and n.id == getattr(target, "id", "")
                and isinstance(n.ctx, ast.Load)
            ]
            if uses and all(id(n) in returned for n in uses) and not any(_passed(r, uses) for r in returns):
                yield node


def _passed(node: ast.Return, uses: list[ast.Name]) -> bool:
    """Whether one of the uses is an argument of a call, which may write to it."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return any(use in ast.walk(call) for call in calls for use in uses)


def counters(tree: ast.Module, dotted: Callable[[ast.AST], str]) -> Iterator[tuple[ast.AST, str, str]]:
    """(node, pattern, reason) for numbers that outlive a call, are incremented in it, and are used in a condition."""
    lasting = {t.id for n in tree.body for t in targets(n) if isinstance(t, ast.Name)}
    lasting |= {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    counted: dict[str, ast.AST] = {}
    decide: set[str] = set()
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))):
        shared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
        for node in ast.walk(function):
            if isinstance(node, ast.AugAssign):
                root, plain = _root(node.target), isinstance(node.target, ast.Name)
                own = root == "self" and isinstance(node.value, ast.Constant)
                if root in shared or own or (not plain and root in lasting):
                    counted[ast.unparse(node.target)] = node
            elif isinstance(node, ast.Call) and dotted(node.func) == "next" and node.args:
                if _root(node.args[0]) in lasting:
                    yield node, "call-counting", f"{ast.unparse(node)[:40]} counts the calls"
            elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
                decide |= _parts(node.test)
            elif isinstance(node, (ast.Compare, ast.BoolOp)):
                decide |= _parts(node)
    for text, node in counted.items():
        if text in decide:
            yield node, "call-counting", f"{text} counts the calls, and decides what one does"


def _parts(node: ast.AST) -> set[str]:
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))}


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
