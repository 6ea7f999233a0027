"""Write a file for a fork the plain way: tests instead of `refuse`, one op without a function that defines it."""

from __future__ import annotations

import ast
import re
from collections.abc import Set

from fastkernels.export.functions import positional
from fastkernels.export.text import WIDTH, Text, blocks, is_kernel, literal, names_in, walk

ONE_OP = """\
LIBRARY.define({schema})
LIBRARY.impl("{op}", {kernel}, "CompositeExplicitAutograd")
torch.library.register_fake("{namespace}::{op}", {fake}, lib=LIBRARY)


{function}
"""
ONE_REGISTERED = """\
LIBRARY.define({schema})
LIBRARY.impl("{op}", {fn}, "CompositeExplicitAutograd")
torch.library.register_fake("{namespace}::{op}", {fake}, lib=LIBRARY)
{name} = torch.ops.{namespace}.{op}.default
"""
GUARD = """\
def {name}(*args):
    if not (args[0].is_cuda or INTERPRETED) or {supports}(*args) is not None:
        raise Unsupported
    return torch.ops.{namespace}.{op}.default(*args)"""


def with_plain_refusals(text: str) -> str:
    """The file with `if TEST: raise Unsupported` for `refuse("function", argument=...)`."""
    code = Text(text)
    for node in walk(code.tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        annotations = {
            a.arg: ast.unparse(a.annotation) for a in node.args.args + node.args.kwonlyargs if a.annotation
        }
        for statement in (s for n in walk(node) for b in blocks(n) for s in b if isinstance(s, ast.Expr)):
            call = statement.value
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "refuse"):
                continue
            tests = [_given(code, k, annotations) for k in call.keywords]
            if all(tests) and code.free(statement):
                joined, indent = " or ".join(filter(None, tests)), " " * statement.col_offset
                code.write(statement, f"if {joined}:\n{indent}    raise Unsupported")
    return code.edited()


def _given(code: Text, keyword: ast.keyword, annotations: dict[str, str]) -> str | None:
    """The test whether an argument of `refuse` is given; None if that depends on its type."""
    value = keyword.value
    if isinstance(value, ast.IfExp) and ast.unparse(value.body) == "None":
        test = value.test
        if not isinstance(test, ast.Compare) or ast.unparse(test.left) != ast.unparse(value.orelse):
            return None
        name, right, op = code.of(test.left), code.of(test.comparators[0]), type(test.ops[0])
        if op not in (ast.Eq, ast.In):
            return None
        listed = right.removeprefix("(").removesuffix(")").rstrip(",") if op is ast.In else right
        if "None" in annotations.get(name, "None"):
            return f"{name} not in (None, {listed})"
        return f"{name} != {right}" if op is ast.Eq else f"{name} not in {right}"
    if (
        isinstance(value, ast.BoolOp)
        and isinstance(value.op, ast.Or)
        and ast.unparse(value.values[1]) == "None"
    ):
        return code.of(value.values[0])
    if isinstance(value, ast.Name) and value.id in annotations:
        return value.id if annotations[value.id] in ("bool", "bool | None") else f"{value.id} is not None"
    return None


def with_one_op(text: str, namespace: str) -> str:
    """The file with its only op defined by three statements, if it is one with a guard."""
    code = Text(text)
    calls = (
        (n, n.value) for n in code.tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)
    )
    made = [(n, call) for n, call in calls if ast.unparse(call.func) in ("guarded", "register")]
    if len(made) != 1:
        return text
    node, call = made[0]
    name = ast.unparse(call.func)
    helper = next(n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    schema = ast.literal_eval(call.args[0])
    names = {"name": ast.unparse(node.targets[0]), "namespace": namespace, "op": schema.partition("(")[0]}
    if name == "register":
        _, fn, fake = (code.of(a) for a in call.args)
        shown = literal(schema).removeprefix("(").removesuffix(")")
        code.write(node, ONE_REGISTERED.format(schema=shown, fn=fn, fake=fake, **names).rstrip())
        code.drop(helper, code.tree.body)
        return code.edited()
    _, kernel, fake, supports = (code.of(a) for a in call.args)
    if supports.startswith("lambda"):
        return text
    checks = next((n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n.name == supports), None)
    function = None
    if checks is not None and len(names_in(code.tree)[supports]) == 1:
        function = _guard(code, checks, **names)
    if checks is not None and function is not None:
        code.drop(checks, code.tree.body)
    new = ONE_OP.format(
        schema=literal(schema).removeprefix("(").removesuffix(")"), kernel=kernel, fake=fake, **names,
        function=function or GUARD.format(supports=supports, **names),
    )  # fmt: skip
    code.write(node, new.rstrip())
    code.drop(helper, code.tree.body)
    return code.edited()


def _guard(code: Text, checks: ast.FunctionDef, name: str, namespace: str, op: str) -> str | None:
    """The function that calls the op, with the body of the function that checks its arguments; None if a result of
    that function is not plain."""
    a, last = checks.args, checks.body[-1]
    named = a.kwarg is not None and a.kwarg.arg != "__"  # the op is called by position
    if a.kwonlyargs or named or not isinstance(last, ast.Return) or not positional(checks):
        return None
    rest = "_" if a.vararg is not None and a.vararg.arg == "_" else ""
    if a.vararg is not None and not rest:
        return None
    body = Text(code.of(checks))
    _drop_annotations(body, body.tree.body[0])  # type: ignore[arg-type]
    body = Text(re.sub(r",\s*\*\*__(?=,?\s*\))", "", body.edited(), count=1))
    made = body.tree.body[0]
    assert isinstance(made, ast.FunctionDef)
    for node in (n for n in walk(made) if isinstance(n, ast.Return) and n is not made.body[-1]):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            body.write(node, "raise Unsupported")
        else:
            return None
    first = positional(made)[0]
    before = f"if not ({first}.is_cuda or INTERPRETED):\n        raise Unsupported\n    "
    call = f"return torch.ops.{namespace}.{op}.default({', '.join([*positional(made), *['*rest'] * bool(rest)])})"
    ending, refused = made.body[-1], None
    assert isinstance(ending, ast.Return) and ending.value is not None
    value = ending.value
    if isinstance(value, ast.IfExp):
        held = value.orelse if ast.unparse(value.body) == "None" else value.body
        if ast.unparse(value.orelse if held is value.body else value.body) != "None" or not _is_reason(held):
            return None
        test = body.of(value.test)
        plain = isinstance(value.test, (ast.Name, ast.Attribute, ast.Call))
        refused = test if held is value.body else f"not {test}" if plain else f"not ({test})"
    elif _is_reason(value):
        return None
    elif ast.unparse(value) != "None":
        refused = body.of(value)
    if refused is not None:
        call = f"if {refused}:\n        raise Unsupported\n    {call}"
    body.write(ending, call)
    if rest and made.args.vararg is not None:
        start = body.span(made.args.vararg)[0]
        body.replace(start, start + 1, "rest")
    at = body.span(made.body[0])[0]
    body.replace(at, at, before) if made.body[0] is not ending else None
    text = body.edited()
    if made.body[0] is ending:
        text = text.replace(call, before + call, 1)
    return re.sub(
        r",\s*\*\*__(?=,?\s*\))", "", re.sub(rf"^def {checks.name}\(", f"def {name}(", text), count=1
    )


def _is_reason(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


ACTIONS = ("raise Unsupported", "return 'unsupported'")


def with_joined_tests(text: str) -> str:
    """The file with tests that follow each other in one, where all leave the call to the host and that is shorter."""
    code = Text(text)
    for block in (b for n in code.python() if isinstance(n, ast.stmt) for b in blocks(n)):
        group: list[ast.If] = []
        for statement in [*block, None]:
            if isinstance(statement, ast.If) and (not group or _action(statement) == _action(group[0])):
                group += [statement] if _action(statement) in ACTIONS else []
                continue
            _join(code, group)
            group = [statement] if isinstance(statement, ast.If) and _action(statement) in ACTIONS else []
    return code.edited()


def _action(node: ast.If) -> str:
    return ast.unparse(node.body[0]) if len(node.body) == 1 and not node.orelse else ""


def _join(code: Text, group: list[ast.If]) -> None:
    if not group:
        return
    tests = [v for n in group for v in (n.test.values if _is_or(n.test) else [n.test])]  # type: ignore[attr-defined]
    if any(isinstance(n, ast.NamedExpr) for t in tests for n in walk(t)):
        return
    first, last, indent = group[0], group[-1], " " * group[0].col_offset
    lines = code.lines[first.lineno - 1 : last.end_lineno]
    pieces = [re.sub(r"\s*\n\s*", " ", code.operand(t)).replace("( ", "(").replace(" )", ")") for t in tests]
    if (len(group) < 2 and len(lines) < 5) or len(pieces) < 2 or any("#" in line for line in lines):
        return
    one = f"{indent}if {' or '.join(pieces)}:"
    if len(one) <= WIDTH:
        code.replace(code.starts[first.lineno - 1], code.span(last)[1], f"{one}\n{lines[-1]}")
        return
    shown = [pieces[0]]
    for piece in pieces[1:]:
        if len(indent) + 4 + len(f"{shown[-1]} or {piece}") <= WIDTH:
            shown[-1] += f" or {piece}"
        else:
            shown.append(f"or {piece}")
    new = [f"{indent}if (", *(f"{indent}    {line}" for line in shown), f"{indent}):", lines[-1]]
    if len(new) < len(lines) and max(map(len, new)) <= WIDTH:
        code.replace(code.starts[first.lineno - 1], code.span(last)[1], "\n".join(new))


def _is_or(node: ast.expr) -> bool:
    return isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)


def without_annotations(text: str, keep: Set[str]) -> str:
    """The file without annotations of functions that only it calls: the op's schema has the types of its arguments."""
    code = Text(text)
    for node in code.tree.body:
        private = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name not in keep
        if not private or is_kernel(node):
            continue
        for function in (n for n in walk(node) if isinstance(n, ast.FunctionDef)):
            _drop_annotations(code, function)
    for local in (n for n in code.python() if isinstance(n, ast.AnnAssign) and n.value is not None):
        if any(isinstance(n, ast.FunctionDef) for n in code.above(local)):
            code.replace(code.span(local.target)[1], code.span(local.value)[0], " = ")  # type: ignore[arg-type]
    return code.edited()


def _drop_annotations(code: Text, function: ast.FunctionDef) -> None:
    a = function.args
    every = [*a.posonlyargs, *a.args]
    pairs = [*zip(every[len(every) - len(a.defaults) :], a.defaults, strict=True)]
    pairs += [(x, d) for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None]
    for arg, default in pairs:
        start = code.span(arg)[0] + len(arg.arg.encode())
        if arg.annotation is not None:
            code.replace(start, code.span(default)[0], "=")
    without = {id(x) for x, _ in pairs}
    for other in (*every, *a.kwonlyargs, a.vararg, a.kwarg):
        if other is not None and other.annotation is not None and id(other) not in without:
            start, end = code.span(other)
            code.replace(start + len(other.arg.encode()), end, "")
    if function.returns is not None:
        start, end = code.span(function.returns)
        code.replace(code.raw.rindex(b"->", 0, start) - 1, end, "")
