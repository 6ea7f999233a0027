"""Specialize an exported file: parameters to which all calls give one value become that value.

Tests of known values are decided, functions of one call are written in its place, and definitions, variables,
parameters and imports that nothing uses are dropped. Names in `keep`, methods of host classes and Triton kernels keep
their parameters. All edits are of the text, so that comments stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Set
from typing import cast

import torch

from fastkernels.export.fold import folded
from fastkernels.export.functions import FunctionNode, default_of, is_literal, is_pure, positional, stores
from fastkernels.export.inline import HELPERS, inlined
from fastkernels.export.records import fields, is_record, plain_attributes
from fastkernels.export.text import WIDTH, Text, above, blocks, bound_names, is_kernel, names_in, walk

ROUNDS = 12


def specialized(text: str, keep: Set[str]) -> str:
    """Return the file; `keep`: the names that others import from it."""
    for _ in range(ROUNDS):
        before = text
        text = folded(_constant_fields(_constant_parameters(text, keep), keep))
        text = without_unused(inlined(_known_variables(text, keep), keep), keep)
        if text == before:
            break
    return _with_rest(text, keep)


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
        return max((positional(m) for m in self.members), key=len)


def _functions(tree: ast.Module, keep: Set[str]) -> Iterator[Calls]:
    """Functions that only this file calls, and ops with all that is called with their arguments."""
    top = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    uses = names_in(tree)
    of_ops: set[str] = set()
    for made in tree.body:
        if not (isinstance(made, ast.Assign) and isinstance(made.value, ast.Call)):
            continue
        if ast.unparse(made.value.func) not in HELPERS:
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
        if name in (*keep, *of_ops, *HELPERS) or is_kernel(node) or node.args.vararg or node.args.kwarg:
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
    return isinstance(node, ast.Assign) and all(
        isinstance(t, ast.Name) and t.id in names for t in node.targets
    )


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
    local = False  # a variable of the caller, of whatever case, is no constant
    arguments = []
    defaults = {ast.unparse(d) for m in function.members if (d := default_of(m, i)) is not None}
    for call in function.calls:
        argument = _argument(call, i, name)
        if argument is None:  # behind a starred argument
            return False
        if isinstance(argument, ast.expr):
            arguments.append((call, argument))
            given.add(ast.unparse(argument))
            if isinstance(argument, ast.Name) and any(
                argument.id in bound_names(f) for f in code.above(call) if isinstance(f, FunctionNode)
            ):
                local = True
        else:
            given |= defaults or {""}
    if function.first:  # beyond the schema: only the default is left
        given |= defaults
    unused = all(not _reads(m, _named(m, i)) and _has(m, i) for m in function.members)
    if not unused and (local or len(given) != 1 or not is_literal(next(iter(given)))):
        return False
    if unused and not all(is_pure(a) for _, a in arguments):
        return False
    if unused and not given and not defaults:
        return False
    value = next(iter(given))
    for member in function.members:
        own = _named(member, i)
        if own is None:
            if _reads_rest(member):
                return False
        elif stores(member, own) or (_is_dict(value) and not _only_looked_up(member, own)):
            return False
    if not code.free(
        *[n for m in function.members for n in (m.args, *_loads(m, _named(m, i)))], *[a for _, a in arguments]
    ):
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
            names = positional(member)
            while names and not _reads(member, names[-1]):
                names.pop()
            every = [*member.args.posonlyargs, *member.args.args]
            if len(names) < len(every) and names and (member.args.vararg is None or not _reads_rest(member)):
                last = member.args.vararg or next(iter(member.args.defaults[::-1]), every[-1])
                start, end = code.span(every[len(names)])[0], code.span(last)[1]
                code.replace(start - (member.args.vararg is every[-1]), end, "*_")
    return code.edited()


def _has(node: FunctionNode, i: int) -> bool:
    return i < len(positional(node)) or node.args.vararg is not None


def _named(node: FunctionNode, i: int) -> str | None:
    names = positional(node)
    return names[i] if i < len(names) else None


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


def _is_dict(text: str) -> bool:
    return text.startswith("{")


def _only_looked_up(node: FunctionNode, name: str) -> bool:
    """Whether a literal in place of the name stays readable: it is only indexed, or passed on."""
    for parent in (above(n) for n in walk(node) if isinstance(n, ast.Name) and n.id == name):
        indexed = isinstance(parent, ast.Subscript) or (
            isinstance(parent, ast.Attribute) and parent.attr == "get"
        )
        if not indexed and not isinstance(parent, (ast.Call, ast.keyword)):
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


# -- fields of one value


def _constant_fields(text: str, keep: Set[str]) -> str:
    """The file in which fields of plain classes that always have one value are this value."""
    code = Text(text)
    classes = [
        n for n in code.tree.body if isinstance(n, ast.ClassDef) and n.name not in keep and is_record(n)
    ]
    known = Counter(f for c in classes for f in fields(c))
    uses = names_in(code.tree)
    for cls in classes:
        calls = _calls(
            {cls.name}, {cls.name: [n for n in uses.get(cls.name, []) if not _in_annotation(n)]}, None
        )
        names = fields(cls)
        for i, name in reversed(list(enumerate(names))):
            if (
                calls
                and known[name] == 1
                and not hasattr(torch.Tensor, name)
                and _replace_field(code, cls, calls, i, name)
            ):
                break
    return code.edited()


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
    given = {
        ast.unparse(a) if isinstance(a, ast.expr) else ast.unparse(statement.value) if statement.value else ""
        for _, a in found
    }
    if len(given) != 1 or any(a is None for _, a in found) or not is_literal(value := next(iter(given))):
        return False
    reads = [n for n in walk(code.tree) if isinstance(n, ast.Attribute) and n.attr == name]
    if any(isinstance(n, ast.keyword) and n.arg == name and above(n) not in calls for n in walk(code.tree)):
        return False
    if len(fields(cls)) == 1 or not code.free(statement, *reads, *calls):
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
    functions = {n.name for n in code.tree.body if isinstance(n, ast.FunctionDef)}
    for made in code.tree.body:  # another name of a function, or of a type
        if not isinstance(made, ast.Assign) or not _is_name_or_tuple(made.value):
            continue
        name, value = ast.unparse(made.targets[0]), ast.unparse(made.value)
        other = name.startswith("_run_") or value in functions or value.startswith("tuple[")
        if other and name not in keep and code.free(made, *uses.get(name, [])):
            for use in uses.get(name, []):
                code.write(use, value)
            code.drop(made, code.tree.body)
    for wrapper in (n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n.name not in keep):
        called = _only_calls(wrapper)
        if called is not None and code.free(wrapper, *uses.get(wrapper.name, [])):
            for use in uses.get(wrapper.name, []):
                code.write(use, called)
            code.drop(wrapper, code.tree.body)
    for node in code.python():
        if isinstance(node, ast.FunctionDef):
            stored = Counter(
                n.id for n in walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
            )
            stored.update(n.arg for n in walk(node) if isinstance(n, ast.arg))
            for block in (b for n in walk(node) if isinstance(n, ast.stmt) for b in blocks(n)):
                for i, statement in enumerate(block):
                    if isinstance(statement, ast.Assign) and len(block) > 1:
                        _replace_variable(code, node, block, i, stored)
    return code.edited()


def _only_calls(node: ast.FunctionDef) -> str | None:
    """The function of another module that the function calls with its own arguments and does nothing else."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or node.decorator_list:
        return None
    same = [ast.unparse(a) for a in call.args] == positional(node) and not call.keywords
    return ast.unparse(call.func) if same and not (node.args.vararg or node.args.kwonlyargs) else None


def _is_name_or_tuple(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (
        isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple"
    )


def _replace_variable(
    code: Text, function: ast.FunctionDef, block: list[ast.stmt], i: int, stored: Counter[str]
) -> None:
    statement = block[i]
    assert isinstance(statement, ast.Assign)
    targets = statement.targets
    if not all(isinstance(t, ast.Name) and stored[t.id] == 1 for t in targets):
        return
    names = {t.id for t in targets}  # type: ignore[attr-defined]
    uses = [
        n for n in walk(function) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)
    ]
    value = ast.unparse(statement.value)
    if not uses:
        if is_pure(statement.value):
            code.drop(statement, block)
    elif is_literal(value) and (not _is_dict(value) or all(_only_looked_up(function, n) for n in names)):
        if code.free(*uses, statement):
            for use in uses:
                code.write(use, value)
            code.drop(statement, block)
    elif (
        isinstance(statement.value, ast.Name)
        and statement.value.id in stored
        and stored[statement.value.id] == 1
    ):
        shorter = len(value) <= max(map(len, names))
        if len(names) == 1 and shorter and code.free(*uses, statement):
            for use in uses:
                code.write(use, value)
            code.drop(statement, block)
    elif found := _fields_of(code, statement, uses, stored):
        for use in uses:
            code.write(above(use), found[id(above(use))])
        code.drop(statement, block)
    elif isinstance(statement.value, ast.Tuple) and len(uses) == 1 and i + 1 < len(block):
        _move_tuple(code, statement, uses[0], block[i + 1], block)


def _fields_of(code: Text, made: ast.Assign, uses: list[ast.Name], stored: Counter[str]) -> dict[int, str]:
    """The values of the fields of a record that only this function reads; {} where they may change."""
    names = [n.id for n in walk(made.value) if isinstance(n, ast.Name)]
    fixed = all(stored[name] <= 1 for name in names)
    found = plain_attributes(code, made, uses) if fixed else {}
    return found if code.free(made, *(above(n) for n in uses if found)) else {}


def _move_tuple(
    code: Text, made: ast.Assign, use: ast.Name, following: ast.stmt, block: list[ast.stmt]
) -> None:
    """Write a tuple where the next statement passes it on."""
    assert isinstance(made.value, ast.Tuple)
    starred = isinstance(above(use), ast.Starred)
    place = cast(ast.expr, above(use)) if starred else use
    call, inside = above(place), not any(True for _ in blocks(following)) and place in walk(following)
    if isinstance(call, ast.Call) and inside and code.free(place, made):
        inner = ", ".join(code.of(e) for e in made.value.elts)
        if len(code.lines[place.lineno - 1]) + len(inner) > WIDTH and not isinstance(above(call), ast.stmt):
            return  # a line of nested calls cannot be broken well
        code.write(place, inner if starred else f"({inner}{',' * (len(made.value.elts) == 1)})")
        code.drop(made, block)


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
            registers = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in HELPERS
            if not bound & used and (registers or is_pure(node.value)):
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
        if isinstance(method, ast.FunctionDef) and (
            not method.name.startswith("__") or method.name == "__str__"
        ):
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
