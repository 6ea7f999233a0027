"""Arithmetic over axes, as op declarations write it: "4 * tokens * heads * hidden". Parsed once, safe to evaluate."""

from __future__ import annotations

import ast
import keyword
import math
from collections.abc import Mapping
from typing import Any

import torch


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _prod(value: Any) -> int:
    return math.prod(value) if isinstance(value, (tuple, list)) else value


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


FUNCTIONS: dict[str, Any] = {
    "abs": abs, "cdiv": _cdiv, "itemsize": _itemsize, "len": len, "max": max, "min": min, "prod": _prod, "sum": sum,
}  # fmt: skip
_GLOBALS = {"__builtins__": {}, **FUNCTIONS}  # no expression can assign to them
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant,
    ast.Tuple, ast.Subscript, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


class Expr:
    """An expression over names. A name that is a Python keyword takes an underscore: `in_` is the axis `in`.

    Allowed are arithmetic, comparisons, `and`, `or`, `not`, `a if c else b`, tuples, indices, and FUNCTIONS. Raises
    ValueError for anything else.
    """

    def __init__(self, text: str):
        self.text = text.strip()
        try:
            self.tree = ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            raise ValueError(f"{text!r} is not an expression: {error.msg}") from None
        names = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, _NODES):
                raise ValueError(f"{text!r}: {type(node).__name__} is not allowed in an expression")
            if isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
            ):
                raise ValueError(f"{text!r}: only {', '.join(FUNCTIONS)} can be called in an expression")
            if isinstance(node, ast.Name):
                if node.id.endswith("_") and keyword.iskeyword(node.id[:-1]):
                    node.id = node.id[:-1]
                if node.id not in FUNCTIONS:
                    names.add(node.id)
        self.names = frozenset(names)
        self._code = compile(self.tree, f"<{self.text}>", "eval")
        self._name = self.name

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The expression's value. Raises KeyError for a name that `values` lacks."""
        if self._name is not None:  # most are one axis
            return values[self._name]
        return eval(self._code, _GLOBALS, {name: values[name] for name in self.names})

    @property
    def name(self) -> str | None:
        """The name that the expression consists of, None for others."""
        body = self.tree.body
        return body.id if isinstance(body, ast.Name) and body.id in self.names else None

    def solve(self, unknown: str, known: Mapping[str, Any], result: int) -> int:
        """The integer for which the expression, linear in `unknown`, has this value. Raises ValueError without one."""
        at = [self({**known, unknown: n}) for n in (0, 1)]
        step = at[1] - at[0]
        if step == 0 or (result - at[0]) % step:
            raise ValueError(f"no integer {unknown} makes {self.text} equal to {result}")
        return (result - at[0]) // step

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"
