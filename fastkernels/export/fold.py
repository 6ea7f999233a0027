"""Decide the tests of an exported file whose values are known from its text."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from fastkernels.export.text import Text, above, blocks

UNKNOWN = object()


def _value(node: ast.expr) -> Any:
    """The value of an expression that is known from its text, else UNKNOWN."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if _is_same(node.left, node.comparators[0]) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return isinstance(node.ops[0], ast.Is)
        return _compared(_value(node.left), node.ops[0], _value(node.comparators[0]))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool" and len(node.args) == 1:
        value = _value(node.args[0])
        return UNKNOWN if value is UNKNOWN else bool(value)
    if isinstance(node, (ast.Subscript, ast.Call)):
        return _looked_up(node)
    return UNKNOWN


def _is_same(left: ast.expr, right: ast.expr) -> bool:
    """Whether both are one attribute."""
    return isinstance(left, ast.Attribute) and ast.unparse(left) == ast.unparse(right)


def _compared(left: Any, op: ast.cmpop, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    compare: dict[type, Callable[[Any, Any], bool]] = {
        ast.Is: lambda a, b: a is b,
        ast.IsNot: lambda a, b: a is not b,
        ast.Eq: lambda a, b: a == b,
        ast.NotEq: lambda a, b: a != b,
    }
    if type(op) in compare:
        return compare[type(op)](left, right)
    if not all(isinstance(v, (int, float)) for v in (left, right)):
        return UNKNOWN
    order: dict[type, Callable[[Any, Any], bool]] = {
        ast.Lt: lambda a, b: a < b,
        ast.LtE: lambda a, b: a <= b,
        ast.Gt: lambda a, b: a > b,
        ast.GtE: lambda a, b: a >= b,
    }
    return order[type(op)](left, right) if type(op) in order else UNKNOWN


def _looked_up(node: ast.Subscript | ast.Call) -> Any:
    """`{...}["key"]` and `{...}.get("key", default)` of a literal."""
    default: Any = UNKNOWN
    if isinstance(node, ast.Subscript):
        of, key = node.value, _value(node.slice)
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "get" and len(node.args) == 2:
        of, key, default = node.func.value, _value(node.args[0]), _value(node.args[1])
    else:
        return UNKNOWN
    if not isinstance(of, ast.Dict) or not all(isinstance(k, ast.Constant) for k in of.keys):
        return UNKNOWN
    known = {k.value: _value(v) for k, v in zip(of.keys, of.values, strict=True)}  # type: ignore[union-attr]
    return known.get(key, default)


def _truth(node: ast.expr) -> Any:
    """Whether a condition holds, where it is known."""
    if isinstance(node, ast.BoolOp):
        found = [_truth(v) for v in node.values]
        decides = isinstance(node.op, ast.Or)
        if decides in found:
            return decides
        return UNKNOWN if UNKNOWN in found else not decides
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _truth(node.operand)
        return UNKNOWN if value is UNKNOWN else not value
    value = _value(node)
    return UNKNOWN if value is UNKNOWN else bool(value)


# -- tests of known values


def folded(text: str) -> str:
    """The file with tests of known values decided, one enclosing another at a time."""
    while True:
        code = Text(text)
        for node in code.python():
            _fold_statements(code, node)
            _fold_expressions(code, node)
        new = code.edited()
        if new == text:
            return text
        text = new


def _fold_statements(code: Text, node: ast.AST) -> None:
    for block in blocks(node):
        for i, statement in enumerate(block):
            if isinstance(statement, ast.If) and (held := _truth(statement.test)) is not UNKNOWN:
                code.replace_if(statement, bool(held), block)
            if isinstance(statement, (ast.Return, ast.Raise)) and i + 1 < len(block):
                for dead in block[i + 1 :]:
                    code.drop(dead, block)
                break


def _fold_expressions(code: Text, node: ast.AST) -> None:
    if isinstance(node, ast.IfExp) and (held := _truth(node.test)) is not UNKNOWN:
        code.put(node, node.body if held else node.orelse)
    elif isinstance(node, ast.BoolOp):
        _fold_operands(code, node)
    elif isinstance(node, ast.keyword) and node.arg is None and _is_named(node.value):
        pairs = zip(node.value.keys, node.value.values, strict=True)  # type: ignore[attr-defined]
        code.write(node, ", ".join(f"{k.value}={code.of(v)}" for k, v in pairs))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        if isinstance(node.right, ast.Constant) and node.right.value in (0, False):
            code.put(node, node.left)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Sub)):
        neutral = 1 if isinstance(node.op, ast.Mult) else 0
        called = isinstance(above(node), ast.Call) and above(node).func is node  # type: ignore[attr-defined]
        if called:  # (ctypes.c_int * 1)(...) is an array
            return
        if isinstance(node.right, ast.Constant) and node.right.value is neutral:
            code.put(node, node.left)
    elif isinstance(node, (ast.Compare, ast.Subscript, ast.Call)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        value = _value(node)
        if value is not UNKNOWN and isinstance(value, (bool, int, float, str, type(None))):
            code.write(node, repr(value))


def _is_named(node: ast.expr) -> bool:
    """Whether a literal has names only as its keys."""
    keys = node.keys if isinstance(node, ast.Dict) else []
    return bool(keys) and all(isinstance(k, ast.Constant) and str(k.value).isidentifier() for k in keys)


def _fold_operands(code: Text, node: ast.BoolOp) -> None:
    """Drop the operands that decide nothing; keep one that decides, and none after it."""
    decides = isinstance(node.op, ast.Or)
    kept: list[ast.expr] = []
    for i, value in enumerate(node.values):
        held = _truth(value)
        if held is UNKNOWN or (held is not decides and i == len(node.values) - 1 and not code.is_test(node)):
            kept.append(value)
        elif held is decides:
            kept = [value] if code.is_test(node) else [*kept, value]
            break
    if len(kept) == len(node.values):
        return
    if len(kept) < 2:
        code.put(node, kept[0]) if kept else code.write(node, str(not decides))
        return
    word = " or " if decides else " and "
    code.write(node, word.join(code.operand(v) for v in kept))
