"""Specialize an exported file: parameters that every call gives one value become that value, and what follows from it.

Tests of known values are decided, and definitions, variables, parameters and imports that nothing uses are dropped. What
`keep` names, host methods and Triton kernels keep their parameters. All edits are of the text: comments stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Set
from typing import Any

import torch

from fastkernels.export.text import Text, above, blocks, bound_names, is_kernel, names_in, walk

UNKNOWN = object()
REGISTER = ("register", "guarded")
ROUNDS = 12
FunctionNode = ast.FunctionDef | ast.Lambda


def specialized(text: str, keep: Set[str]) -> str:
    """Return the file; `keep`: the names that others import from it."""
    for _ in range(ROUNDS):
        before = text
        for step in (_constant_parameters, _constant_fields, _folded, _known_variables, _inlined, without_unused):
            text = step(text, keep)
        if text == before:
            break
    return _with_rest(text, keep)


# -- values


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
        return _compared(_value(node.left), node.ops[0], _value(node.comparators[0]))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool" and len(node.args) == 1:
        value = _value(node.args[0])
        return UNKNOWN if value is UNKNOWN else bool(value)
    if isinstance(node, (ast.Subscript, ast.Call)):
        return _looked_up(node)
    return UNKNOWN


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


def _folded(text: str, keep: Set[str]) -> str:
    """The file with tests of known values decided, one enclosing another at a time."""
    while True:
        code = Text(text)
        left = {n.name for n in code.tree.body if isinstance(n, ast.FunctionDef) and _raises(n)}
        for node in code.python():
            _fold_statements(code, node, left)
            _fold_expressions(code, node)
        new = code.edited()
        if new == text:
            return text
        text = new


def _raises(node: ast.FunctionDef) -> bool:
    """Whether the function only raises Unsupported, as that of an op with a file of its own."""
    return len(node.body) == 1 and ast.unparse(node.body[0]) == "raise Unsupported"


def _is_left(statement: ast.stmt, left: set[str]) -> bool:
    """Whether the statement calls one of these functions, or returns it to a caller that does."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Tuple) and isinstance(statement, ast.Return) and value.elts:
        return isinstance(value.elts[0], ast.Name) and value.elts[0].id in left
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in left


def _fold_statements(code: Text, node: ast.AST, left: set[str]) -> None:
    for block in blocks(node):
        for i, statement in enumerate(block):
            if left and _is_left(statement, left):
                code.write(statement, "raise Unsupported")
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
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Sub)):
        neutral = 1 if isinstance(node.op, ast.Mult) else 0
        if isinstance(node.right, ast.Constant) and node.right.value is neutral:
            code.put(node, node.left)
    elif isinstance(node, (ast.Compare, ast.Subscript, ast.Call)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        value = _value(node)
        if value is not UNKNOWN and isinstance(value, (bool, int, float, str, type(None))):
            code.write(node, repr(value))


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


# -- parameters of one value


class Calls:
    """A function of the file or the members of an op, and all calls of it; None where a use is not a call."""

    def __init__(
        self, members: list[FunctionNode], calls: list[ast.Call], schema: ast.expr | None = None, first: int = 0
    ) -> None:  # fmt: skip
        self.members, self.calls, self.schema = members, calls, schema
        self.first = first  # parameter that may be replaced

    def positional(self) -> list[str]:
        """Parameters by position, those of the member with the most."""
        return max((_positional(m) for m in self.members), key=len)


def _positional(node: FunctionNode) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args)]


def _functions(tree: ast.Module, keep: Set[str]) -> Iterator[Calls]:
    """Functions that only this file calls, and ops with all that is called with their arguments."""
    top = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    uses = names_in(tree)
    of_ops: set[str] = set()
    for made in tree.body:
        if not (isinstance(made, ast.Assign) and isinstance(made.value, ast.Call)):
            continue
        if ast.unparse(made.value.func) not in REGISTER:
            continue
        op = made.targets[0].id  # type: ignore[attr-defined]
        schema, *rest = made.value.args
        of_ops |= {a.id for a in rest if isinstance(a, ast.Name)}
        if any(isinstance(a, ast.Call) for a in rest):
            continue
        inner = {f"_run_{op}", *(a.id for a in rest if isinstance(a, ast.Name))}
        members = [top[a.id] if isinstance(a, ast.Name) else a for a in rest]
        found = None if op in keep else _calls({op, *inner}, uses, made)
        first = 0
        if found is None:  # its arguments are unknown, but not that it has no more than its schema
            found, first = _calls(inner, uses, made), ast.literal_eval(schema).split(" -> ")[0].count(",") + 1
        if found is not None and all(isinstance(m, (ast.FunctionDef, ast.Lambda)) for m in members):
            yield Calls(members, found, schema, first)  # type: ignore[arg-type]
    for name, node in top.items():
        if name in (*keep, *of_ops, *REGISTER) or is_kernel(node) or node.args.vararg or node.args.kwarg:
            continue
        found = _calls({name}, uses, None)
        if found:
            yield Calls([node], found)


def _calls(
    names: set[str], uses: dict[str, list[ast.Name]], made: ast.Assign | None
) -> list[ast.Call] | None:
    """The calls of the names, None if one has another use."""
    found = []
    for use in (use for name in names for use in uses.get(name, ())):
        parent = above(use)
        if isinstance(parent, ast.Call) and parent.func is use:
            found.append(parent)
        elif made is not None and (parent is made.value or _is_alias(parent, names)):
            continue
        else:
            return None
    return found


def _is_alias(node: ast.AST, names: set[str]) -> bool:
    """`_run_OP = kernel`."""
    return isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id in names for t in node.targets)


def _constant_parameters(text: str, keep: Set[str]) -> str:
    """The file in which parameters that have one value in all calls are this value."""
    while True:
        code = Text(text)
        for function in _functions(code.tree, keep):
            for i, name in reversed(list(enumerate(function.positional()))):
                if i >= function.first and _replace_parameter(code, function, i, name):
                    break
        new = code.edited()
        if new == text:
            return text
        text = new


def _replace_parameter(code: Text, function: Calls, i: int, name: str) -> bool:
    """Whether the parameter is replaced."""
    given: set[str] = set()
    arguments = []
    defaults = {ast.unparse(d) for m in function.members if (d := _default(m, i)) is not None}
    for call in function.calls:
        argument = _argument(call, i, name)
        if argument is None:  # behind a starred argument
            return False
        if isinstance(argument, ast.expr):
            arguments.append((call, argument))
            given.add(ast.unparse(argument))
        else:
            given |= defaults or {""}
    if function.first:  # beyond the schema: only the default is left
        given |= defaults
    unused = all(not _reads(m, _named(m, i)) and _has(m, i) for m in function.members)
    if not unused and (len(given) != 1 or not _is_literal(next(iter(given)))):
        return False
    if unused and not all(_is_pure(a) for _, a in arguments):
        return False
    if unused and not given and not defaults:
        return False
    value = next(iter(given))
    for member in function.members:
        own = _named(member, i)
        if own is None:
            if _reads_rest(member):
                return False
        elif _stores(member, own) or (_is_dict(value) and not _only_looked_up(member, own)):
            return False
    if not code.free(*[n for m in function.members for n in (m.args, *_loads(m, _named(m, i)))], *[a for _, a in arguments]):
        return False
    for member in function.members:
        own = _named(member, i)
        if own is not None:
            for use in _loads(member, own):
                code.write(use, value)
            code.drop_parameter(member, i)
    for call, argument in arguments:
        code.drop_argument(call, argument)
    if function.schema is not None:
        code.drop_of_schema(function.schema, i)
    return True


def _with_rest(text: str, keep: Set[str]) -> str:
    """The file in which functions with the arguments of an op take the last ones that they do not read as `*_`."""
    code = Text(text)
    for function in _functions(code.tree, keep):
        for member in function.members if function.schema is not None and not function.first else ():
            names = _positional(member)
            while names and not _reads(member, names[-1]):
                names.pop()
            every = [*member.args.posonlyargs, *member.args.args]
            if len(names) < len(every) and names and (member.args.vararg is None or not _reads_rest(member)):
                last = member.args.vararg or next(iter(member.args.defaults[::-1]), every[-1])
                start, end = code.span(every[len(names)])[0], code.span(last)[1]
                code.replace(start - (member.args.vararg is every[-1]), end, "*_")
    return code.edited()


def _has(node: FunctionNode, i: int) -> bool:
    return i < len(_positional(node)) or node.args.vararg is not None


def _named(node: FunctionNode, i: int) -> str | None:
    names = _positional(node)
    return names[i] if i < len(names) else None


def _default(node: FunctionNode, i: int) -> ast.expr | None:
    at = i - (len(_positional(node)) - len(node.args.defaults))
    return node.args.defaults[at] if 0 <= at < len(node.args.defaults) else None


def _argument(call: ast.Call, i: int, name: str) -> ast.expr | bool | None:
    """The argument, False if it is not given, None if that is unknown."""
    for at, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            return None
        if at == i:
            return argument
    for keyword in call.keywords:
        if keyword.arg in (None, name):
            return keyword.value if keyword.arg else None
    return False


def _is_literal(text: str) -> bool:
    node = ast.parse(text, mode="eval").body if text else None
    if isinstance(node, ast.Dict):
        return all(isinstance(v, ast.Constant) for v in (*node.keys, *node.values))
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    ) or (isinstance(node, ast.Name) and node.id.isupper())  # fmt: skip


def _is_dict(text: str) -> bool:
    return text.startswith("{")


def _only_looked_up(node: FunctionNode, name: str) -> bool:
    """Whether a literal in place of the name stays readable: it is only indexed, or passed on."""
    for parent in (above(n) for n in walk(node) if isinstance(n, ast.Name) and n.id == name):
        indexed = isinstance(parent, ast.Subscript) or (isinstance(parent, ast.Attribute) and parent.attr == "get")
        if not indexed and not isinstance(parent, (ast.Call, ast.keyword)):
            return False
    return True


PURE_CALLS = ("len", "bool", "stride", "dim", "numel", "size", "data_ptr", "get", "getattr", "max", "min")


def _is_pure(node: ast.expr) -> bool:
    """Whether the expression can be left out: it has no effect."""
    for n in walk(node):
        if isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield)):
            return False
        if isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] not in PURE_CALLS:
            return False
    return True


def _loads(node: FunctionNode, name: str | None) -> list[ast.Name]:
    body = node.body if isinstance(node.body, list) else [node.body]
    return [
        n for s in body for n in walk(s)
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    ]  # fmt: skip


def _reads(node: FunctionNode, name: str | None) -> bool:
    return bool(_loads(node, name)) if name is not None else _reads_rest(node)


def _reads_rest(node: FunctionNode) -> bool:
    return node.args.vararg is not None and bool(_loads(node, node.args.vararg.arg))


def _stores(node: FunctionNode, name: str) -> bool:
    body = node.body if isinstance(node.body, list) else [node.body]
    for n in (n for s in body for n in walk(s)):
        if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load):
            return True
        if isinstance(n, ast.arg) and n.arg == name:
            return True
    return False


# -- fields of one value


def _constant_fields(text: str, keep: Set[str]) -> str:
    """The file in which fields of plain classes that always have one value are this value."""
    code = Text(text)
    classes = [n for n in code.tree.body if isinstance(n, ast.ClassDef) and n.name not in keep and _is_record(n)]
    fields = Counter(f for c in classes for f in _fields(c))
    uses = names_in(code.tree)
    for cls in classes:
        calls = _calls({cls.name}, {cls.name: [n for n in uses.get(cls.name, []) if not _in_annotation(n)]}, None)
        names = _fields(cls)
        for i, name in reversed(list(enumerate(names))):
            if calls and fields[name] == 1 and not hasattr(torch.Tensor, name) and _replace_field(code, cls, calls, i, name):
                break
    return code.edited()


def _is_record(node: ast.ClassDef) -> bool:
    return any(ast.unparse(b) == "NamedTuple" for b in node.bases) or any(
        ast.unparse(d).startswith("dataclass") for d in node.decorator_list
    )


def _fields(node: ast.ClassDef) -> list[str]:
    return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def _in_annotation(node: ast.AST) -> bool:
    while isinstance(node, ast.expr):
        inner, node = node, above(node)
        if inner is getattr(node, "annotation", None) or inner is getattr(node, "returns", None):
            return True
    return False


def _replace_field(code: Text, cls: ast.ClassDef, calls: list[ast.Call], i: int, name: str) -> bool:
    """Whether the field is replaced."""
    statement = next(n for n in cls.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name)
    found = [(call, _argument(call, i, name)) for call in calls]
    given = {ast.unparse(a) if isinstance(a, ast.expr) else ast.unparse(statement.value) if statement.value else "" for _, a in found}
    if len(given) != 1 or any(a is None for _, a in found) or not _is_literal(value := next(iter(given))):
        return False
    reads = [n for n in walk(code.tree) if isinstance(n, ast.Attribute) and n.attr == name]
    if any(isinstance(n, ast.keyword) and n.arg == name and above(n) not in calls for n in walk(code.tree)):
        return False
    if len(_fields(cls)) == 1 or not code.free(statement, *reads, *calls):
        return False
    for read in reads:
        code.write(read, value)
    for call, argument in found:
        if isinstance(argument, ast.expr):
            code.drop_argument(call, argument)
    code.drop(statement, cls.body)
    return True


# -- variables of one value


def _known_variables(text: str, keep: Set[str]) -> str:
    """The file without variables that are assigned once: a literal, or a tuple for a single call."""
    code = Text(text)
    uses = names_in(code.tree)
    for node in code.tree.body:  # another name of a function
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name not in keep and name.startswith("_run_") and code.free(node, *uses.get(name, [])):
                for use in uses.get(name, []):
                    code.write(use, node.value.id)
                code.drop(node, code.tree.body)
    for node in code.python():
        if isinstance(node, ast.FunctionDef):
            stored = Counter(
                n.id for n in walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
            )
            stored.update(n.arg for n in walk(node) if isinstance(n, ast.arg))
            for i, statement in enumerate(node.body):
                if isinstance(statement, ast.Assign) and len(node.body) > 1:
                    _replace_variable(code, node, i, statement, stored)
    return code.edited()


def _replace_variable(
    code: Text, function: ast.FunctionDef, i: int, statement: ast.Assign, stored: Counter[str]
) -> None:
    targets = statement.targets
    if not all(isinstance(t, ast.Name) and stored[t.id] == 1 for t in targets):
        return
    names = {t.id for t in targets}  # type: ignore[attr-defined]
    uses = [n for n in walk(function) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    value = ast.unparse(statement.value)
    if not uses:
        if _is_pure(statement.value):
            code.drop(statement, function.body)
    elif _is_literal(value) and (not _is_dict(value) or all(_only_looked_up(function, n) for n in names)):
        if code.free(*uses, statement):
            for use in uses:
                code.write(use, value)
            code.drop(statement, function.body)
    elif isinstance(statement.value, ast.Name) and statement.value.id in stored and stored[statement.value.id] == 1:
        if len(names) == 1 and code.free(*uses, statement):
            for use in uses:
                code.write(use, value)
            code.drop(statement, function.body)
    elif isinstance(statement.value, ast.Tuple) and len(uses) == 1 and i + 1 < len(function.body):
        inner = [n for n in walk(function.body[i + 1]) if isinstance(n, ast.Starred) and n.value is uses[0]]
        if inner and code.free(inner[0], statement):
            code.write(inner[0], ", ".join(code.of(e) for e in statement.value.elts))
            code.drop(statement, function.body)


# -- functions of one call


def _inlined(text: str, keep: Set[str]) -> str:
    """The file with the expression of a function, or the tests of one, in the place of its only call."""
    code = Text(text)
    uses = names_in(code.tree)
    for node in code.tree.body:
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.name in (*keep, *REGISTER):
            continue
        found = uses.get(node.name, [])
        call = above(found[0]) if len(found) == 1 else None
        if isinstance(call, ast.Call) and call.func is found[0]:
            _inline(code, node, call)
    return code.edited()


def _inline(code: Text, node: ast.FunctionDef, call: ast.Call) -> None:
    given = _arguments_by_name(node, call)
    body = node.body[1:] if ast.get_docstring(node) else node.body
    enclosing = next((n for n in code.above(call) if isinstance(n, ast.FunctionDef)), None)
    if given is None or not body or enclosing is None or enclosing is node or is_kernel(enclosing):
        return
    for name, argument in given.items():
        reads = len([n for s in body for n in walk(s) if isinstance(n, ast.Name) and n.id == name])
        if reads > 1 and not isinstance(argument, (ast.Name, ast.Constant)) and (reads > 3 or not _is_cheap(argument)):
            return
    locals_ = bound_names(node) - given.keys()
    inner = {n.id for s in body for n in walk(s) if isinstance(n, ast.Name)} - given.keys() - locals_
    if inner & bound_names(enclosing) or not code.free(node):
        return  # a local variable would hide what the function reads
    if len(body) == 1 and isinstance(body[0], ast.Return) and body[0].value is not None:
        value = body[0].value
        if any(isinstance(n, (ast.Lambda, ast.comprehension)) for n in walk(value)) and any(
            not isinstance(a, (ast.Name, ast.Constant)) for a in given.values()
        ):
            return
        text = code.substituted(value, given)
        if len(text) <= 80 and "\n" not in text and code.free(call):
            code.put_text(call, value, text)
            code.drop(node, code.tree.body)
        return
    statement = above(call)
    returns = [n for s in body for n in walk(s) if isinstance(n, ast.Return)]
    if any(isinstance(n, ast.Constant) and "\n" in str(n.value) for s in body for n in walk(s)):
        return
    whole = isinstance(statement, ast.Return) or (isinstance(statement, ast.Expr) and not returns)
    result = None
    if isinstance(statement, ast.Assign) and statement.value is call and len(returns) == 1:
        result = returns[0].value if returns[0] is body[-1] else None
        whole = result is not None
    names = {n.id for n in walk(enclosing) if isinstance(n, ast.Name)} | bound_names(enclosing)
    if whole and not locals_ & names and (node.end_lineno or 0) - node.lineno <= MOST_INLINED and code.free(statement):
        start, end = code.starts[body[0].lineno - 1], code.span(body[-1])[1]
        while (line := code.lines[code.starts.index(start) - 1]).lstrip().startswith("#") and line.startswith(" "):
            start = code.starts[code.starts.index(start) - 1]
        lines = code.substituted(node, given, start, end).split("\n")
        if result is not None:
            target = code.raw[code.span(statement)[0] : code.span(call)[0]].decode()
            lines = code.substituted(node, given, start, code.span(body[-1])[0]).split("\n")
            lines[-1] += target + code.substituted(result, given)
        indent = " " * (statement.col_offset - body[0].col_offset)  # type: ignore[attr-defined]
        code.write(statement, "\n".join(f"{indent}{x}" if x else x for x in lines).lstrip())
        code.drop(node, code.tree.body)


MOST_INLINED = 16  # lines of a function


def _is_cheap(node: ast.expr) -> bool:
    """An attribute, an element of one, or a part of that."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.right, ast.Constant) and _is_cheap(node.left)
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, (ast.Constant, ast.UnaryOp)) and _is_cheap(node.value)
    return isinstance(node, (ast.Attribute, ast.Name))


def _arguments_by_name(node: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """{parameter: argument}, None if that is not plain."""
    a = node.args
    if a.vararg or a.kwarg or a.kwonlyargs or any(isinstance(x, ast.Starred) for x in call.args):
        return None
    names = _positional(node)
    given = dict(zip(names, call.args, strict=False))
    given.update({k.arg: k.value for k in call.keywords if k.arg})
    for i, name in enumerate(names):
        default = _default(node, i)
        if name not in given and default is not None:
            given[name] = default
    stored = any(_stores(node, name) for name in names)
    return given if given.keys() == set(names) and not stored and not any(k.arg is None for k in call.keywords) else None


# -- definitions that nothing uses


def without_unused(text: str, keep: Set[str]) -> str:
    """The file without definitions, methods and imports that nothing uses."""
    code = Text(text)
    tree = code.tree
    uses = names_in(tree)
    used = uses.keys() | keep
    attributes = Counter(n.attr for n in walk(tree) if isinstance(n, ast.Attribute))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own = sum(isinstance(n, ast.Name) and n.id == node.name for n in walk(node))
            if node.name not in keep and len(uses.get(node.name, ())) <= own:
                code.drop(node, tree.body)
            elif isinstance(node, ast.ClassDef) and node.name not in keep:
                _drop_unused_methods(code, node, attributes)
        elif isinstance(node, ast.Assign):
            bound = {n.id for t in node.targets for n in walk(t) if isinstance(n, ast.Name)}
            registers = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in REGISTER
            if not bound & used and (registers or _is_pure(node.value)):
                code.drop(node, tree.body)
            elif isinstance(node.targets[0], ast.Tuple) and not bound <= used:
                _drop_elements(code, node, used)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            left = [a for a in node.names if (a.asname or a.name).partition(".")[0] in used]
            if not left:
                code.drop(node, tree.body)
            elif len(left) < len(node.names) and isinstance(node, ast.ImportFrom):
                names = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in left)
                code.write(node, f"from {node.module} import {names}")
    return code.edited()


def _drop_unused_methods(code: Text, cls: ast.ClassDef, attributes: Counter[str]) -> None:
    for method in cls.body:
        if isinstance(method, ast.FunctionDef) and (not method.name.startswith("__") or method.name == "__str__"):
            inside = sum(isinstance(n, ast.Attribute) and n.attr == method.name for n in walk(method))
            if attributes[method.name] == inside:
                code.drop(method, cls.body)


def _drop_elements(code: Text, node: ast.Assign, used: set[str]) -> None:
    """`A, B = 1, 2` without the names that nothing uses."""
    target, value = node.targets[0], node.value
    if len(node.targets) > 1 or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return
    pairs = [p for p in zip(target.elts, value.elts, strict=True) if ast.unparse(p[0]) in used]
    left, right = (", ".join(code.of(p[i]) for p in pairs) for i in (0, 1))
    code.write(node, f"{left} = {right}")
