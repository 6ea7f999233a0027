"""Write a file for a fork the plain way: tests instead of `refuse`, one op without a function that defines it."""

from __future__ import annotations

import ast

from fastkernels.export.text import Text, blocks, literal, walk

ONE_OP = '''\
LIBRARY.define({schema})
LIBRARY.impl("{op}", {kernel}, "CompositeExplicitAutograd")
torch.library.register_fake("{namespace}::{op}", {fake}, lib=LIBRARY)


def {name}(*args):
    if not (args[0].is_cuda or INTERPRETED) or {supports}(*args) is not None:
        raise Unsupported
    return torch.ops.{namespace}.{op}.default(*args)
'''


def with_plain_refusals(text: str) -> str:
    """The file with `if TEST: raise Unsupported` for `refuse("function", argument=...)`."""
    code = Text(text)
    for node in walk(code.tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        annotations = {a.arg: ast.unparse(a.annotation) for a in node.args.args + node.args.kwonlyargs if a.annotation}
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
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or) and ast.unparse(value.values[1]) == "None":
        return code.of(value.values[0])
    if isinstance(value, ast.Name) and value.id in annotations:
        return value.id if annotations[value.id] in ("bool", "bool | None") else f"{value.id} is not None"
    return None


def with_one_op(text: str, namespace: str) -> str:
    """The file with its only op defined by three statements, if it is one with a guard."""
    code = Text(text)
    made = [
        n for n in code.tree.body
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and ast.unparse(n.value.func) in ("guarded", "register")
    ]  # fmt: skip
    helper = next((n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n.name == "guarded"), None)
    if len(made) != 1 or helper is None or ast.unparse(made[0].value.func) != "guarded":  # type: ignore[attr-defined]
        return text
    (node,) = made
    _, kernel, fake, supports = (code.of(a) for a in node.value.args)  # type: ignore[attr-defined]
    name, op = ast.unparse(node.targets[0]), ast.literal_eval(node.value.args[0]).partition("(")[0]  # type: ignore[attr-defined]
    if supports.startswith("lambda"):
        return text
    code.write(node, ONE_OP.format(
        schema=literal(ast.literal_eval(node.value.args[0])).removeprefix("(").removesuffix(")"), op=op, kernel=kernel, fake=fake, supports=supports, name=name,
        namespace=namespace,
    ).rstrip())  # fmt: skip
    code.drop(helper, code.tree.body)
    return code.edited()
