"""Every exported file passes a call that its kernels do not support to the host's code, with the arguments as given."""

from __future__ import annotations

import ast
import builtins
from typing import Any

import pytest
import torch
from fk_integrations.signatures import diff as compare

from fastkernels.core import registry
from fastkernels.export.exporter import ExportError, export, fork_targets

CHECK = "self.supports() is not None"
HOSTS = [(host, compare.versions(host)[-1]) for host in compare.hosts()]


class Given:
    """An argument of a call; nothing but its identity may matter to a fallback."""

    def __repr__(self) -> str:
        return f"argument {id(self):#x}"


def recording(calls: list[Any], methods: set[str]) -> type:
    """A host's class whose methods of these names, and itself as a function, note their arguments."""

    class Host:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is Host:
                calls.append((args, kwargs))
            return object.__new__(cls)

    for name in methods - {"supports"}:
        setattr(Host, name, lambda self, *args, **kwargs: calls.append((args, kwargs)))
    return Host


def calls_host(handler: ast.ExceptHandler) -> bool:
    """Whether this is the fallback to the host's code; a helper of ours may have another one."""
    code = ast.unparse(handler)
    return "Unsupported" in code and ("super()" in code or "host" in code.lower())


def refused(node: ast.FunctionDef) -> ast.FunctionDef | None:
    """The function whose attempt assigns to all that it may change, and raises; None without a fallback."""
    tries = [s for s in node.body if isinstance(s, ast.Try) and s.handlers and calls_host(s.handlers[0])]
    for attempt in tries:
        names = {n.id for s in attempt.body for n in ast.walk(s)
                 if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
        attempt.body = ast.parse(
            "\n".join([*(f"{n} = None" for n in sorted(names)), "raise Unsupported"])
        ).body
    for argument in [
        *node.args.posonlyargs,
        *node.args.args,
        *node.args.kwonlyargs,
        node.args.vararg,
        node.args.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    node.decorator_list, node.returns = [], None
    return node if tries or CHECK in ast.unparse(node) else None


def fallbacks(text: str) -> list[tuple[str | None, ast.FunctionDef]]:
    """(class or None, function) of a file, for each that has a fallback."""
    found: list[tuple[str | None, ast.FunctionDef]] = []
    for node in ast.parse(text).body:
        several = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = node.name if isinstance(node, ast.ClassDef) else None
        found += [
            (owner, f) for s in several if isinstance(s, ast.FunctionDef) and (f := refused(s)) is not None
        ]
    return found


def call(owner: str | None, node: ast.FunctionDef, reason: str | None) -> tuple[dict[str, Any], list[Any]]:
    """({parameter: argument}, what the host's code got) of one call that ours does not support.

    reason  why the module is unsupported; None: the call is
    """
    calls: list[Any] = []
    hosts = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id.lower().startswith("host")}
    base = recording(calls, {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)})
    base.supports = lambda self: reason  # type: ignore[attr-defined]
    known = {
        **vars(builtins),
        **dict.fromkeys(hosts, base),
        "Unsupported": type("Unsupported", (Exception,), {}),
    }
    names = [
        n.id
        for d in (*node.args.defaults, *node.args.kw_defaults)
        if d
        for n in ast.walk(d)
        if isinstance(n, ast.Name)
    ]
    namespace = {**dict.fromkeys(names), **known, "torch": torch}
    code: Any = node
    if owner is not None:
        namespace["Base"] = base
        code = ast.parse(f"class {owner}(Base): pass").body[0]
        code.body = [node]
    exec(compile(ast.fix_missing_locations(ast.Module([code], [])), "<fallback>", "exec"), namespace)
    parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    if owner is not None:
        parameters = parameters[1:]
    positional = {p: Given() for p in parameters}
    keywords = {a.arg: Given() for a in node.args.kwonlyargs}
    function = getattr(namespace[owner](), node.name) if owner is not None else namespace[node.name]
    calls.clear()
    function(*positional.values(), **keywords)
    return {**positional, **keywords}, calls


@pytest.mark.parametrize(
    "others", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "others"]
)
@pytest.mark.parametrize(
    "host, version",
    [
        pytest.param(*h, id=h[0], marks=pytest.mark.slow if h[0] in ("transformers", "timm") else [])
        for h in HOSTS
    ],
)
def test_fallback_of_each_file_gets_the_arguments(host: str, version: str, others: bool) -> None:
    """Of an op's files for several modules of the host, the first or the others."""
    checked = 0
    for name in registry.op_names():
        try:
            found = fork_targets(registry.get(name), host, version)
        except ExportError:
            continue
        files: dict[tuple[str, ...], str] = {}  # of those that differ in the host's module alone, the first
        for module in dict.fromkeys(t.path.partition(":")[0] for t in found):
            files.setdefault(tuple(t.cls for t in found if t.path.startswith(f"{module}:")), module)
        for module in [*files.values()][1:] if others else [*files.values()][:1]:
            for owner, node in fallbacks(export(name, host, version, only=module)):
                code = ast.unparse(node)
                for reason in [
                    *([None] if "except Unsupported" in code else []),
                    *(["test"] if CHECK in code else []),
                ]:
                    given, calls = call(owner, node, reason)
                    where = f"{name} for {module}: {owner or ''}.{node.name}"
                    assert len(calls) == 1, f"{where} ran the host's code {len(calls)} times"
                    args, kwargs = calls[0]
                    assert [*args, *kwargs.values()] == [*given.values()], where
                    assert all(given[key] is value for key, value in kwargs.items()), where
                    checked += 1
    assert checked or others
