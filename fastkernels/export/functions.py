"""Parameters of functions, and expressions that can be moved or left out."""

from __future__ import annotations

import ast

from fastkernels.export.text import walk

FunctionNode = ast.FunctionDef | ast.Lambda


def positional(node: FunctionNode) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args)]


def default_of(node: FunctionNode, i: int) -> ast.expr | None:
    at = i - (len(positional(node)) - len(node.args.defaults))
    return node.args.defaults[at] if 0 <= at < len(node.args.defaults) else None


def is_literal(text: str) -> bool:
    node = ast.parse(text, mode="eval").body if text else None
    if isinstance(node, ast.Dict):
        return all(isinstance(v, ast.Constant) for v in (*node.keys, *node.values))
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    ) or (isinstance(node, ast.Name) and node.id.isupper())  # fmt: skip


PURE = (
    "len",
    "bool",
    "stride",
    "dim",
    "numel",
    "size",
    "data_ptr",
    "get",
    "getattr",
    "max",
    "min",
    "type",
    "tuple",
)


def is_pure(node: ast.expr) -> bool:
    """Whether the expression can be left out: it has no effect."""
    for n in walk(node):
        if isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)):
            return False
        if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] not in PURE:
            return False
    return True


def stores(node: FunctionNode, name: str) -> bool:
    body = node.body if isinstance(node.body, list) else [node.body]
    for n in (n for s in body for n in walk(s)):
        if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load):
            return True
        if isinstance(n, ast.arg) and n.arg == name:
            return True
    return False
