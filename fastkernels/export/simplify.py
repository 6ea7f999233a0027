"""Rewrite a module's text for export: one kernel an op, parameters as literals, CUDA sources embedded."""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels.core import registry, tuning
from fastkernels.export.text import parsed, walk

PACKAGE = __name__.partition(".")[0]
METHODS = "into|faster|winner|requested"  # kept in an exported file, in addition to a call and `run`
DISPATCH = ("register", "guarded", "Unsupported", "INTERPRETED", "Op")
NAMES = {"partial", *DISPATCH}  # of what the new text may use
DROPPED = "# dropped"
INTEGERS = re.compile(rf"(?m)^from {PACKAGE}\.overrides\.kit\.launch import (.*)$")
OF_TRITON = ("cdiv", "next_power_of_2")
REQUESTED = re.compile(r"\b[a-z]\w*\.requested\b")
# A class of a running host that a patch has replaced has this attribute.
OWN_OF_MARKED = re.compile(rf'\bgetattr\((\w+), "{PACKAGE}", \1\)')
NO_MARK = re.compile(rf'\b(?:hasattr\(\w+, "{PACKAGE}"|getattr\(\w+, "{PACKAGE}_tried", False)\)')
CUDA_ONLY = ("supports_wgmma",)
# Methods that count and log a call that plain PyTorch, or the host, then computes
LOGGING = ("note", "leave")
COUNTING = (*LOGGING, "count_call")
LOGS = re.compile(rf"\.(?:{'|'.join(COUNTING)})\b")
FLAT = """\
def _run_{name}(*args: Any) -> Any:
    \"\"\"Run the kernel where it supports the call, else plain PyTorch.\"\"\"
    fits = (args[0].is_cuda or INTERPRETED) and {supports}
    return ({kernel} if fits else {plain})(*args)


{name} = register(
    {schema},
    _run_{name},
    {fake},
)"""

FLAT_CUDA = FLAT.replace("    fits = (args[0].is_cuda or INTERPRETED) and {supports}\n", "").replace(
    "fits", "{supports}"
)

RAISING = """\
def _run_{name}(*args: Any) -> Any:
    \"\"\"Run the kernel. Raises Unsupported for calls that it does not support.\"\"\"
    if not (args[0].is_cuda or INTERPRETED) or {supports} is not None:
        raise Unsupported
    return {kernel}(*args)


{name} = {made}"""


class Fork(NamedTuple):
    """The host of a file for a fork."""

    host: str
    own: tuple[
        tuple[str, str], ...
    ] = ()  # (module of ours, file in `plain` that replaces it) in this file alone


def simplified(module: str, text: str, fork: Fork | None = None) -> str:
    """The module's text with its op definitions and CUDA sources replaced; `fork`: for a file in a fork."""
    if ".overrides." not in module:
        return text
    text = INTEGERS.sub(_of_triton, text)
    text = _with_winners(module, _without_logging(_without_fallbacks(text) if fork else text))
    if fork:  # nothing is requested by name in an exported file
        text = REQUESTED.sub('""', text)
        text = NO_MARK.sub("False", OWN_OF_MARKED.sub(r"\1", text))
    lines = text.split("\n")
    needed: set[str] = set()
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            new = _replacement(module, node.targets[0].id, node.value, text, fork)
            if new is not None:
                lines[node.lineno - 1 : node.end_lineno] = new.split("\n")
                needed |= NAMES & set(re.findall(r"\w+", new))
    for name, line in (
        ("partial", "from functools import partial"),
        *((n, f"from {PACKAGE}.core.dispatch import {n}") for n in DISPATCH),
    ):
        if name in needed:
            at = next(i for i, x in enumerate(lines) if x.startswith("from __future__")) + 1
            lines.insert(at, line)
    return "\n".join(lines)


def _of_triton(match: re.Match[str]) -> str:
    """Import two functions from Triton, which the library has for their speed on the host."""
    names = match[1].split(", ")
    theirs, ours = (", ".join(n for n in names if (n in OF_TRITON) == there) for there in (True, False))
    lines = [f"from {PACKAGE}.overrides.kit.launch import {ours}"] * bool(ours)
    return "\n".join([*lines, *[f"from triton import {theirs}"] * bool(theirs)])


def _without_logging(text: str) -> str:
    """Drop calls that only count or log."""
    if not LOGS.search(text):
        return text
    lines = text.split("\n")
    for block in _bodies(text):
        for node in block:
            if _calls_method(node, COUNTING):
                for i in range(node.lineno - 1, node.end_lineno or 0):
                    lines[i] = DROPPED
                if len(block) == 1:
                    lines[node.lineno - 1] = f"{' ' * node.col_offset}pass"
    return "\n".join(line for line in lines if line != DROPPED)


def _bodies(text: str) -> list[list[ast.stmt]]:
    return [body for n in walk(parsed(text)) if isinstance(body := getattr(n, "body", None), list)]


def _calls_method(node: ast.stmt, names: Sequence[str]) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names


def _without_fallbacks(text: str) -> str:
    """Leave to the host what follows a call that logs a fallback: in a fork, its code is the fallback."""
    if not LOGS.search(text):
        return text
    lines = text.split("\n")
    for block in sorted(_bodies(text), key=lambda b: -b[0].lineno):
        logged = next((node for node in block[:-1] if _calls_method(node, LOGGING)), None)
        if logged is not None:
            lines[logged.lineno - 1 : block[-1].end_lineno] = [f"{' ' * logged.col_offset}raise Unsupported"]
    if len(lines) < text.count("\n") + 1 and "Unsupported" not in _imported(text):
        at = next(i for i, x in enumerate(lines) if x.startswith("from __future__")) + 1
        lines.insert(at, f"from {PACKAGE}.core.dispatch import Unsupported")
    return "\n".join(lines)


def _imported(text: str) -> set[str]:
    found = (n for n in ast.parse(text).body if isinstance(n, ast.ImportFrom))
    return {a.asname or a.name for n in found for a in n.names}


def _replacement(module: str, name: str, value: ast.expr, text: str, fork: Fork | None) -> str | None:
    if "__file__" in ast.unparse(value) or ".with_name(" in ast.unparse(value):
        path = getattr(importlib.import_module(module), name)
        return f"{name} = r'''{path.read_text()}'''" if isinstance(path, Path) else None
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "define"):
        return None
    schema = ast.get_source_segment(text, value.args[0]) or ""
    if "\n" in schema:
        schema = f"({schema})"
    keywords = {k.arg: k.value for k in value.keywords}
    fake = ast.unparse(keywords["fake"])
    kernel, supports, plain = _implementations(module, name, keywords["providers"])
    if fork:
        listed = {c.args[0].value: ast.unparse(c.args[1]) for c in keywords["providers"].elts}  # type: ignore[attr-defined]
        # The host's code is the fallback of a Triton kernel. torch.compile cannot trace the checks of a CUDA kernel.
        if kernel == listed.get("triton"):
            made = _call("guarded", schema, kernel, fake, supports or "lambda *_: None")
            return f"{name} = {made}\n_run_{name} = {kernel}"
        if supports and plain == listed["reference"] and _is_functional(name):
            # Compiled code has no fallback from an op that raises: no method of a host's class calls such an op.
            supported = f"{supports}(*args)"
            made = _call("register", schema, f"_run_{name}", fake)
            return RAISING.format(name=name, made=made, kernel=kernel, supports=supported)
    elif name in _with_methods():
        supports = supports or "lambda *_: None"
        return f"{name} = Op({schema}, {fake}, kernel={kernel}, plain={plain}, supports={supports})"
    call = f"({supports})" if supports and not supports.isidentifier() else supports
    test = f"{call}(*args) is None" if supports else "True"
    if supports in CUDA_ONLY:  # it tests the device itself
        return FLAT_CUDA.format(
            name=name, schema=schema, fake=fake, kernel=kernel, plain=plain, supports=test
        )
    return FLAT.format(name=name, schema=schema, fake=fake, kernel=kernel, plain=plain, supports=test)


def _call(function: str, schema: str, *arguments: str) -> str:
    """A call of `guarded` or `register` as text, with one argument a line where it is long."""
    one = f"{function}({schema}, {', '.join(arguments)})"
    if len(one) <= 90 and "\n" not in one:
        return one
    text = schema[1:-1] if schema.startswith("(") else schema  # the lines of a long string
    glued = ", ".join(a.replace(" ", "\0") for a in arguments)  # break between arguments only
    lines = textwrap.wrap(glued, 106, break_long_words=False, break_on_hyphens=False)
    rest = "\n".join(lines).replace("\0", " ")
    return f"{function}(\n    {text},\n" + textwrap.indent(rest, "    ") + ",\n)"


def _is_functional(name: str) -> bool:
    return name in registry.op_modules() and not registry.get(name).targets


def _implementations(module: str, name: str, providers: ast.expr) -> tuple[str, str | None, str]:
    """(kernel, supports, plain PyTorch) of an op, as expressions."""
    listed = {c.args[0].value: c for c in providers.elts}  # type: ignore[attr-defined]
    chosen, params = _winner(getattr(importlib.import_module(module), name))
    keywords = {k.arg: ast.unparse(k.value) for k in listed[chosen].keywords}
    kernel = ast.unparse(listed[chosen].args[1])
    if params and not _is_literal(getattr(importlib.import_module(module), name), chosen):
        kernel = f"partial({kernel}, {', '.join(f'{k}={v!r}' for k, v in params.items())})"
    every = [n for n, call in listed.items() if all(k.arg != "supports" for k in call.keywords)]
    plain = next(n for n in ("cublas", "torch", "reference") if n in every)
    return kernel, keywords.get("supports"), ast.unparse(listed[plain].args[1])


def _winner(op: Any) -> tuple[str, dict[str, Any]]:
    """Our kernel that the shipped tables choose most often, and its parameters if most of its entries agree on them.

    Where they differ by shape, the kernel's own choice is better than the set of a few shapes.
    """
    own = [
        p.name
        for p in op.providers
        if p.module is None and p.name.startswith(("triton", "cuda-", "linear", "cublaslt"))
    ]
    wins = collections.Counter(
        (e.provider, json.dumps(dict(e.params), sort_keys=True))
        for e in (tuning.shipped_entries(op.name) if op.key is not None else ())
        if e.provider in own
    )
    if not wins:
        return own[0], {}
    best = max(own, key=lambda n: sum(count for (name, _), count in wins.items() if name == n))
    sets = {params: count for (name, params), count in wins.items() if name == best}
    most = max(sets, key=lambda params: sets[params])
    return best, json.loads(most) if 2 * sets[most] > sum(sets.values()) else {}


# -- winning parameters as literals in the function that takes them


@cache
def _winners() -> dict[tuple[str, str], dict[str, Any]]:
    """{(module, function): its winning parameters} of all ops."""
    found = {}
    for name in registry.op_names():
        if (op := registry.get(name).op) is not None:
            chosen, params = _winner(op)
            fn = next(p.fn for p in op.providers if p.name == chosen)
            if params and _chooses(Path(inspect.getsourcefile(fn) or "").read_text(), fn.__name__):
                found[fn.__module__, fn.__name__] = params
    return found


def _is_literal(op: Any, chosen: str) -> bool:
    fn = next(p.fn for p in op.providers if p.name == chosen)
    return (fn.__module__, fn.__name__) in _winners()


def _chooses(text: str, name: str) -> list[ast.expr]:
    """The expressions in a function that add its own choice to given parameters: `{**choose(...), **params}`."""
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    if node.args.kwarg is None:
        return []
    chosen = [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Dict) and ast.unparse(n).endswith(f", **{node.args.kwarg.arg}}}")
    ]
    either = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n.orelse in chosen]
    return [*either, *(n for n in chosen if all(n is not e.orelse for e in either))]


def _with_winners(module: str, text: str) -> str:
    """The module's text in which functions have their winning parameters as literals instead of choosing them."""
    for (owner, name), params in _winners().items() if "**params" in text else ():
        if owner != module:
            continue
        lines = text.split("\n")
        for node in sorted(_chooses(text, name), key=lambda n: -n.lineno):
            line = lines[node.lineno - 1]
            assert node.lineno == node.end_lineno, line
            before, after = line[: node.col_offset], line[node.end_col_offset :]
            if before.endswith("**"):
                made = before[:-2] + ", ".join(f"{k}={v!r}" for k, v in params.items())
            else:
                made = before + json.dumps(params)
            lines[node.lineno - 1] = made + after
        text = re.sub(rf"(\ndef {name}\((?:.|\n)*?),\s*\*\*params: \w+", r"\1", "\n".join(lines), count=1)
    return text


@cache
def _with_methods() -> set[str]:
    """Names of which some family uses methods of the Op object, other than a call and `run`."""
    called = re.compile(rf"\b(\w+)\.(?:{METHODS})\b")
    return {name for file in registry.OPS_ROOT.rglob("*.py") for name in called.findall(file.read_text())}
