"""The functions that a module's own forward calls, read from its source: torch's by name, those of its file followed.

A forward is read as it runs with the module's attributes and its default arguments: a branch that another value selects
is skipped. Losses and functions that resize a table of positions are skipped, too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

MODELS = "transformers.models."
READ = ("transformers.", "timm.")  # whose code is read
SKIPPED = ("loss", "interpolate_pos", "resize_pos", "init_weights", "prune", "rope_index", "moving_average")
_MODES = {  # of resampling: what our ops compute
    "interpolate": {"nearest", "linear", "bilinear", "bicubic", "trilinear"},
    "upsample": {"nearest", "linear", "bilinear", "bicubic", "trilinear"},
    "grid_sample": {"bilinear", "nearest", "zeros", "border"},
}
_INTERFACE = "attention_interface"


@cache
def parsed(function: Any) -> ast.FunctionDef | None:
    """The definition of a function, or None if its source cannot be read."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def calls(module: Any, method: str = "forward") -> frozenset[str]:
    """Names of the functions that the module's own code calls, without those of its children.

    A function of torch or method of a tensor has its last name ('softmax'), the operator @ is 'matmul', a call through
    transformers' attention functions is 'attention_interface', `super().forward` is 'super', a call into a library that
    the file loads later is 'loaded kernel'.
    """
    found: set[str] = set()
    seen: set[Any] = set()
    todo = [getattr(type(module), method, None)]
    while todo:
        function = todo.pop()
        function = inspect.unwrap(function) if function is not None else None
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        node = parsed(function)
        if node is None or not function.__module__.startswith(READ):
            continue
        reader = _Reader(module, function)
        for statement in node.body:
            reader.visit(statement)
        found |= reader.names
        todo += reader.functions
    return frozenset(found)


class _Reader(ast.NodeVisitor):
    def __init__(self, module: Any, function: FunctionType) -> None:
        self.module, self.globals = module, function.__globals__
        parameters = inspect.signature(function).parameters.values()
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.names: set[str] = set()
        self.functions: list[Any] = []

    def visit_If(self, node: ast.If) -> None:
        value = self._value(node.test)
        self.visit(node.test)
        for statement in node.body if value in (True, None) else ():
            self.visit(statement)
        for statement in node.orelse if value in (False, None) else ():
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        value = self._value(node.test)
        if value in (True, None):
            self.visit(node.body)
        if value in (False, None):
            self.visit(node.orelse)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult):
            self.names.add("product" if _transposed(node.right) or self._is_weight(node.right) else "matmul")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # `nn.Softmax(dim=-1)(x)` is a softmax
        name = (
            ast.unparse(node.func.func).lower() if isinstance(node.func, ast.Call) else ast.unparse(node.func)
        )
        last = name.rpartition(".")[2]
        if any(word in name for word in SKIPPED):
            return
        if isinstance(node.func, ast.Name):
            function = self.globals.get(name)
            if name == _INTERFACE:
                self.names.add(name)
            elif isinstance(function, FunctionType) and function.__module__.startswith((MODELS, "timm.")):
                self.functions.append(function)
            elif isinstance(function, FunctionType) or not isinstance(function, type):
                self.names.add(name)
        elif last == "apply" and name.count(".") == 1 and isinstance(self.globals.get(name[:-6]), type):
            own = getattr(self.globals[name[:-6]], "forward", None)  # of an autograd function
            if isinstance(own, FunctionType):
                self.functions.append(own)
            else:
                self.names.add("autograd function")
        elif name.startswith("super()"):
            self.names.add("super")
        elif name.startswith("self.") and name.count(".") == 1:
            function = getattr(type(self.module), last, None)
            own = getattr(self.module, last, None)
            if isinstance(inspect.unwrap(function), FunctionType) if function else False:
                self.functions.append(function)
            else:
                own = own.func if isinstance(own, partial) else own
                if isinstance(own, (FunctionType, BuiltinFunctionType)):
                    self.names.add(own.__name__.removeprefix("fft_"))
        elif last in ("matmul", "mm", "bmm") and node.args and _transposed(node.args[-1]):
            self.names.add("product")
        elif last in _MODES and not self._is_child(node.func):
            self.names.add(last if self._usual(node, last) else f"{last} otherwise")
        elif last == "unfold" and not name.startswith(("F.", "nn.functional.", "torch.nn.functional.")):
            pass  # a view of a tensor, without the products of torch.nn.functional.unfold
        elif self._is_loaded(node.func):
            self.names.add("loaded kernel")
        elif not self._is_child(node.func):
            self.names.add(last)
        self.generic_visit(node)

    def _usual(self, node: ast.Call, last: str) -> bool:
        """Whether the arguments of a resampling are those that our op has, as far as the code shows."""
        for keyword in node.keywords:
            if keyword.arg in ("mode", "padding_mode"):
                known = _literals(keyword.value, self)
                if not known or not known <= _MODES[last]:
                    return False
            if keyword.arg == "antialias" and self._value(keyword.value) is not False:
                return False
        return True

    def _is_weight(self, node: ast.expr) -> bool:
        """Whether this is a parameter of the module with two dimensions."""
        import torch

        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "self":
            return False
        found = getattr(self.module, node.attr, None)
        return isinstance(found, torch.nn.Parameter) and found.dim() == 2

    def _is_loaded(self, func: ast.expr) -> bool:
        """Whether `a.b(...)` calls a library that the file's variable `a` holds only once it is loaded."""
        name = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
        return self.globals.get(name, name) is None

    def _is_child(self, func: ast.expr) -> bool:
        """Whether `self.a.b(...)` calls a module or a method of one."""
        found: Any = self.module
        for part in ast.unparse(func).split(".")[1:]:
            found = getattr(found, part, None)
        return ast.unparse(func).startswith("self.") and found is not None

    def _value(self, test: ast.expr) -> bool | None:
        """The value of a condition that depends on the module and on default arguments only; None: unknown."""
        names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
        known = {"self": self.module, **self.defaults}
        if not names <= set(known) or any(isinstance(n, (ast.Call, ast.NamedExpr)) for n in ast.walk(test)):
            return None
        if "training" in ast.unparse(test):
            return False
        try:
            return bool(eval(compile(ast.Expression(test), "", "eval"), {}, known))
        except Exception:  # of any attribute of a host's module
            return None


def _transposed(node: ast.expr) -> bool:
    """Whether this is `x.t()` or `x.T`, which need a tensor of two dimensions."""
    text = ast.unparse(node)
    return text.endswith((".t()", ".T")) or ".t().to(" in text


def _literals(node: ast.expr, reader: _Reader) -> set[str]:
    """The strings that an expression may be; empty if the code does not show them."""
    if isinstance(node, ast.Constant):
        return {str(node.value)}
    if isinstance(node, ast.IfExp):
        found = _literals(node.body, reader), _literals(node.orelse, reader)
        return found[0] | found[1] if all(found) else set()
    if isinstance(node, ast.Name):
        value = reader.defaults.get(node.id)
        return {value} if isinstance(value, str) else set()
    value = getattr(reader.module, node.attr, None) if isinstance(node, ast.Attribute) else None
    return {value} if isinstance(value, str) else set()
