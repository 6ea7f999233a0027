"""Write an op's host classes as one self-contained file that a maintainer pastes into a fork.

The file is assembled from our source by AST: every definition that the host's methods reach is copied as written.
Imports of this package vanish, colliding names get a suffix, our class takes the host's name, and the functional
ops move to a namespace of their own. `simplify.py` leaves each op one kernel and plain PyTorch.
"""

from __future__ import annotations

import ast
import builtins
import gc
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fastkernels import __version__
from fastkernels.core import registry
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export.flat import with_joined_tests, with_one_op, with_plain_refusals, without_annotations
from fastkernels.export.fold import folded
from fastkernels.export.layout import reflowed
from fastkernels.export.records import with_named_tuples, without_unused_loop_names
from fastkernels.export.refusals import with_raised_refusals
from fastkernels.export.shorten import with_any, without_single_constants, without_single_uses
from fastkernels.export.simplify import Fork
from fastkernels.export.source import (
    LAYER,
    PACKAGE,
    PLAIN,
    ExportError,
    Key,
    Source,
    Statement,
    Uses,
    origin,
    read,
)
from fastkernels.export.specialize import specialized, without_unused
from fastkernels.export.tidy import (
    compact,
    errors_of_the_host,
    joined,
    without_assertions,
    without_private_docstrings,
    without_reasons,
    without_unused_methods,
)

NAMESPACE = re.compile(rb'(?<=")fastkernels(?=")|\bfastkernels(?=::)|(?<=\bops\.)fastkernels\b')
HEADER = '''\
# SPDX-License-Identifier: Apache-2.0
# Copyright The FastKernels Authors
"""{names} for {host} {version}: {docstring}

Exported from FastKernels {own}, op {op} ({files}).
Needs {needs}; the functional ops are torch.ops.{namespace}.*.
{form}
"""

from __future__ import annotations

'''
FORK = "Each class below keeps its host base class; its methods replace the host's methods of the same name."
FUNCTIONS = (
    "The functions replace the host's functions of the same name, which run calls that no kernel supports."
)
PLACE = "With --into FORK, `fk-bench export` saves it next to the host's module, which then imports it last."
STANDALONE = "Standalone classes with the host's constructor signatures, for code without the host."
# The host's subclasses and callers use more of a class than its constructor and forward.
REFUSAL = """

def _refuse(cls: type, **options: object) -> None:
    if cls.__module__.startswith("{host}."):
        raise TypeError(f"{{cls.__name__}} needs the class of {host}: in a fork, export {op} without --standalone")


for _class in ({names}):
    _refuse(_class)
    _class.__init_subclass__ = classmethod(_refuse)
"""
# A subclass of a class with several forward methods that overrides one of them has a computation of its own.
DISPATCHED = '''

def _keep_own(cls: type, **options: object) -> None:
    """Give a subclass that overrides forward_cuda or its like the host's forward, which calls it."""
    ours = next(c for c in cls.__mro__[1:] if c in _CLASSES)
    names = [name for name in dir(ours.__base__) if name.startswith("forward_")]
    if cls.forward is ours.forward and any(getattr(cls, n) != getattr(ours.__base__, n) for n in names):
        cls.forward = ours.__base__.forward


_CLASSES = ({names})
for _class in _CLASSES:
    _class.__init_subclass__ = classmethod(_keep_own)
'''
DISPATCHERS = ("vllm", "sglang")  # hosts whose leaf classes choose among forward_cuda, forward_cpu, ...
# A class put in by these seams has the host's constructor; of ours only the methods count.
# In a fork, experts keep the host's code for all but the grouped products, through whose launch all of it goes.
_LAUNCH = {
    "vllm": "vllm.model_executor.layers.fused_moe.fused_moe:invoke_fused_moe_triton_kernel",
    "sglang": "sglang.kernels.ops.moe.fused_moe_triton_kernels:invoke_fused_moe_kernel",
}
_PRODUCTS = {"fused_experts": "grouped_product", "fused_experts_fp8": "grouped_product_fp8"}
INSTEAD = {
    (op, host): Target(host, path, ours, "function", module=f"{PACKAGE}.export.plain.experts_{host}")
    for op, ours in _PRODUCTS.items()
    for host, path in _LAUNCH.items()
}
# Likewise, layers keep the host's code for all but the float8 product.
_SCALED_MM = {"vllm": "vllm._custom_ops:cutlass_scaled_mm", "sglang": "sglang.kernels.ops.gemm:fp8_scaled_mm"}
INSTEAD |= {
    ("linear_fp8", host): Target(
        host, path, path.partition(":")[2], "function", module=f"{PACKAGE}.export.plain.scaled_mm_{host}"
    )
    for host, path in _SCALED_MM.items()
}
# Functions with scales of whole tensors, which a fork's file leaves to the host (plain/fork_quantize.py)
LEFT = ("sglang_static_quant_fp8",)
# Without a host class: no host has a function with their arguments.
NO_PLACE = {
    "linear_residual": "the blocks of gated_residual call it in code that torch.compile traces",
    "linear_silu_and_mul": "it runs in place of two modules of a host, where a measurement says so",
    "fused_experts_gelu": "fused_experts replaces the product of a host's experts with any activation: export that",
    "fused_experts_int4": "hosts pack and order such weights for their own kernels when they load them",
    "fused_experts_nvfp4": "hosts pack and order such weights for their own kernels when they load them",
    "fused_experts_swigluoai": "hosts pack and order such weights for their own kernels when they load them",
}
# Our kernel in these modules' files is another op's: attention itself stays the function that the host calls.
_DENSE = f"{PACKAGE}.overrides.dense_attention.attention_dense"
OWN = {
    "diffusers.models.transformers.transformer_flux": ((_DENSE, "fork_attention.py"),),
    "timm.layers.attention": ((_DENSE, "fork_sdpa.py"),),
    "timm.models.eva": ((_DENSE, "fork_sdpa.py"),),
}
ON_BACKEND = "on_backend"  # the function with which a method leaves a call that names a backend to the host
BACKEND = "backend"  # its keyword, which SGLang before 0.5.21 does not have: no other call passes it on
CHECKS_CALLS = "checks_calls"  # attribute of our classes whose methods leave unsupported modules to the host
METHOD_SEAMS = ("leaf", "module", "quant_method", "kernel", "scheme", "experts", "processor")


@dataclass
class Part:
    """One module's share of the file: the statements that are reached, and what they use."""

    source: Source
    taken: dict[int, tuple[Statement, Uses]] = field(default_factory=dict)

    def statements(self) -> list[tuple[Statement, Uses]]:
        return sorted(self.taken.values(), key=lambda pair: pair[0].start)

    @property
    def needs(self) -> list[str]:
        """Modules whose definitions this one's statements use when they are executed."""
        keys = [u.key for _, uses in self.statements() for u in uses.uses if u.eager]
        return list(dict.fromkeys(k[0] for k in keys if k is not None and k[0] != self.source.name))


@dataclass
class Replaced:
    """A host class whose methods the file replaces: of each its module, its statement and the names it uses."""

    ours: str
    path: str
    name: str
    about: str
    methods: list[tuple[Source, Statement, Uses]]
    dispatched: bool = False
    others: tuple[str, ...] = ()  # paths of further classes that get the same methods
    assigned: Mapping[str, Key] = field(default_factory=dict)  # methods that are functions of ours

    @property
    def names(self) -> list[str]:
        return [path.partition(":")[2] for path in (self.path, *self.others)]

    @property
    def supports(self) -> bool:
        """Whether there is a method `supports`, which the others call."""
        return "supports" in [*self.assigned, *(s.node.name for _, s, _ in self.methods)]  # type: ignore[attr-defined]


def targets(spec: OpSpec, host: str, version: str) -> list[Target]:
    """The op's targets in that host version; none for a purely functional op. Raises ExportError that lists them."""
    found = spec.targets_for(host, version)
    names = {t.path.partition(":")[2] for t in found if not t.of_a_model}
    # A file has one class of a name: that of the host's layers, not the namesake in a model's file.
    found = [t for t in found if not t.of_a_model or t.path.partition(":")[2] not in names]
    if not found and spec.targets:
        there = sorted({f"{t.host} {t.versions}".strip() for t in spec.targets})
        raise ExportError(
            f"{spec.name} has no class for {host} {version}. It has: {', '.join(there) or 'none'}"
        )
    return found


def fork_targets(spec: OpSpec, host: str, version: str) -> list[Target]:
    """Return the targets that a fork can replace: methods of classes that stay the host's, and functions.

    Raises ExportError, also for an op that only has classes that are built anew: in a fork they would lack what the
    host's subclasses and callers use.
    """
    targets(spec, host, version)  # raises if there is none
    if spec.name in NO_PLACE:
        raise ExportError(
            f"{spec.name} has no file for a fork: {NO_PLACE[spec.name]}. Use --standalone for the function alone."
        )
    if (spec.name, host) in INSTEAD:
        return [INSTEAD[spec.name, host]]
    found = spec.targets_for(host, version)  # namesakes in models' files, too
    found = [t for t in found if t.cls not in LEFT]
    kept = [t for t in found if t.seam != "standalone" and (_keeps_host_class(t) or _is_function(t))]
    if found and not kept:
        names = ", ".join(dict.fromkeys(t.path.partition(":")[2] for t in found))
        inner = [c for c in spec.calls if _is_for(registry.get(c), host, version)]
        instead = f"Export what it calls ({', '.join(inner)}), or use" if inner else "Use"
        raise ExportError(
            f"{spec.name} has no file for a fork of {host} {version}: {names} would lose what {host} itself calls on"
            f" it. {instead} --standalone for code without {host}."
        )
    return kept


def printed(found: list[Target]) -> list[Target]:
    """Targets of one file for a fork: those of the first module, of functions of one name the first."""
    here = [t for t in found if _module(t) == _module(found[0])]
    functions = {t.path.partition(":")[2]: t for t in reversed(here) if _is_function(t)}
    return [t for t in here if not _is_function(t) or t in functions.values()]


def _is_for(spec: OpSpec, host: str, version: str) -> bool:
    """Whether the op has a file for a fork of this host version."""
    try:
        fork_targets(spec, host, version)
    except ExportError:
        return False
    return True


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collections of garbage scan the syntax trees again and again, for a third of the time of an export."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collections()
def export(op: str, host: str, version: str, standalone: bool = False, only: str = "") -> str:
    """Return the text of the file.

    standalone  write whole classes, constructors included, that need no host
    only        the module of the host whose classes and functions the file replaces; '' for those of `printed`

    Raises UnknownName for the op, ExportError for the host or version.
    """
    spec = registry.get(op)
    if spec.ranks:
        raise ExportError(
            f"{op} is a collective: it needs a group's buffers, which one file cannot bring along"
        )
    found = (targets if standalone else fork_targets)(spec, host, version)
    modules = list(dict.fromkeys(_module(t) for t in found))
    namespace = f"{PACKAGE}_{op}_{host}"
    if only:
        found = [t for t in found if _module(t) == only]
        if not found:
            raise ExportError(f"{op} has nothing for {only}. It has: {', '.join(modules) or 'no module'}")
        namespace += f"_{only.rpartition('.')[2]}" if only != modules[0] else ""
    elif standalone:  # one name, one class
        found = list({t.path.partition(":")[2]: t for t in reversed(found)}.values())[::-1]
    else:
        found = printed(found)
    module = registry.op_modules()[op]
    kept = [] if standalone else [t for t in found if _keeps_host_class(t)]
    whole = [t for t in found if t not in kept]
    # Whole classes need no host. Methods and functions leave unsupported calls to the host's code of the same name;
    # a functional op, which no host has, leaves them to its caller.
    fork = None if standalone else Fork(host, OWN.get(_module(found[0]) if found else "", ()))
    alike: dict[Any, list[Target]] = {}
    for target in kept:
        alike.setdefault(tuple(_methods(target).values()), []).append(target)
    replaced = [_replaced(group, fork) for group in alike.values()]
    roots = [origin(t.module, t.cls, fork) for t in whole]
    roots += [k for r in replaced for _, _, uses in r.methods for k in _keys(uses)]
    roots += [key for r in replaced for key in r.assigned.values()]
    if not found:
        alone = (op,) if fork else ("reference", op)
        roots += [(module, name) for name in alone if name in read(module, fork).bound]
    parts = _reach(roots, fork)
    falls_back = "Unsupported" in {n for p in parts.values() for s, _ in p.statements() for n in s.names}
    order = _order(parts)
    aliases = _host_names(whole, fork)
    hosts = {origin(t.module, t.cls, fork): t.path for t in reversed(whole)} if falls_back else {}
    names = _final_names(parts, order, module, aliases)
    text = _header(spec, found, host, version, namespace, parts, replaced, fork)
    imported = [p for r in replaced for p in (r.path, *r.others)]
    imported += list(hosts.values())
    text += "\n".join(_external(parts, replaced, imported)) + "\n"
    attributes = _attributes(parts, replaced)
    after_definition = False  # two blank lines around a definition, none between plain statements
    text += "\n"
    for name in order:
        for statement, uses in parts[name].statements():
            definition = isinstance(statement.node, (ast.ClassDef, ast.FunctionDef))
            copied = _copied(parts[name].source, statement, uses, names, namespace)
            host_path = hosts.get((name, *statement.names[:1]))  # type: ignore[arg-type]
            if host_path is not None and isinstance(statement.node, ast.FunctionDef):
                copied = _with_fallback(copied, _host_name(host_path))
            if name in PLAIN and isinstance(statement.node, ast.ClassDef):
                copied = without_unused_methods(copied, attributes)
            text += ("\n\n" if definition or after_definition else "") + copied + "\n"
            after_definition = definition
    written: dict[str, str] = {}
    for r in replaced:
        text += _class_text(r, names, namespace, written, falls_back)
    if dispatched := [name for r in replaced if r.dispatched for name in r.names]:
        text += DISPATCHED.format(names="".join(f"{name}, " for name in dispatched).rstrip())
    for first, *others in aliases.values():
        text += "\n" + "".join(f"{other} = {first}\n" for other in others) if others else ""
    if built := list(dict.fromkeys(n for t, n in _named(whole) if not fork and not _is_function(t))):
        text += REFUSAL.format(host=host, op=op, names="".join(f"{name}, " for name in built).rstrip())
    if falls_back:
        text = errors_of_the_host(text)
    if fork:
        public = {n for names in aliases.values() for n in names} | {n for r in replaced for n in r.names}
        public |= {"_keep_own", "_CLASSES"} | (set() if found else {op, f"_run_{op}"})
        start = text.index("from __future__")
        text = text[:start] + _shortened(text[start:], frozenset(public), namespace)
    text = compact(text)
    compile(text, f"{op}.py", "exec")
    return text


@lru_cache(maxsize=256)
def _shortened(text: str, public: frozenset[str], namespace: str) -> str:
    """Return a file for a fork, without its header, with only what its classes and functions need."""
    text = with_plain_refusals(without_private_docstrings(without_reasons(without_assertions(text)), public))
    text = with_raised_refusals(text.replace("  # fmt: skip", ""), public)
    text = with_one_op(joined(specialized(text, public)), namespace)
    text = with_named_tuples(without_unused_loop_names(without_annotations(text, public)), public)
    text = without_single_constants(with_any(without_unused(text, public)), public)
    text = reflowed(without_single_uses(reflowed(text)))
    return with_joined_tests(folded(with_any(text)))


def _module(target: Target) -> str:
    return target.path.partition(":")[0]


def _named(found: list[Target]) -> list[tuple[Target, str]]:
    return [(t, t.path.partition(":")[2]) for t in found]


def _keeps_host_class(target: Target) -> bool:
    return target.seam in METHOD_SEAMS and isinstance(registry.target_class(target), type)


def _is_function(target: Target) -> bool:
    return target.seam == "function" or not isinstance(registry.target_class(target), type)


def _host_name(path: str) -> str:
    """The name under which the file imports the host's class or function."""
    name = path.partition(":")[2]
    return f"Host{name}" if name[0].isupper() else f"host_{name.lstrip('_')}"


def _with_fallback(text: str, host: str, supports: bool = False) -> str:
    """The function or method with its body in a `try`; calls that no kernel supports go to `host`, as given."""
    node = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines, a = text.split("\n"), node.args
    positional = [x.arg for x in (*a.posonlyargs, *a.args)]
    called = positional[1:] if positional[:1] == ["self"] else positional
    keywords = [x.arg for x in a.kwonlyargs if x.arg != BACKEND]
    called = called + [f"{name}={name}" for name in keywords]
    rest = [f"*{a.vararg.arg}"] if a.vararg else []
    rest += [f"**{a.kwarg.arg}"] if a.kwarg else []
    stored = {
        n.id
        for s in node.body
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    if changed := [x.arg for s in node.body for n in ast.walk(s) if isinstance(n, ast.AugAssign)
                   for x in (*a.args, *a.kwonlyargs) if ast.unparse(n.target) == x.arg]:  # fmt: skip
        raise ExportError(f"{node.name} changes {', '.join(changed)}, which the host's code then gets")
    documented = ast.get_docstring(node) is not None and len(node.body) > 1
    first = node.body[1 if documented else 0].lineno - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    indent = re.match(r" *", lines[node.body[0].lineno - 1])[0]  # type: ignore[index]
    body = ["    " + line if line else line for line in lines[first:]]
    head: list[str] = []
    if supports:
        head += [
            f"{indent}if self.supports() is not None:",
            f"{indent}    return {host}({', '.join([*called, *rest])})",
        ]
    if stored & {*positional, *(x.arg for x in a.kwonlyargs)}:  # the host's code gets the arguments as given
        if keywords:
            raise ExportError(f"{node.name} assigns to its arguments")
        head, called = [*head, f"{indent}given = [{', '.join(called)}]"], ["*given"]
    tail = [f"{indent}except Unsupported:", *_returned(host, [*called, *rest], f"{indent}    ")]
    return "\n".join([*lines[:first], *head, f"{indent}try:", *body, *tail])


def _returned(function: str, called: list[str], indent: str) -> list[str]:
    """The lines that return a call."""
    one = f"{indent}return {function}({', '.join(called)})"
    if len(one) <= 110:
        return [one]
    inner = indent + "    "
    wrapped = textwrap.wrap(", ".join(called), 110, initial_indent=inner, subsequent_indent=inner)
    return [f"{indent}return {function}(", *wrapped, f"{indent})"]


def _with_check(text: str, host: str) -> str:
    """The method, which first leaves a module that it does not support to `host`."""
    node = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines, indent = text.split("\n"), "        "
    at = node.body[0].lineno - 1
    arguments = ", ".join(x.arg for x in node.args.args[1:])
    check = [f"{indent}if self.supports() is not None:", f"{indent}    return {host}({arguments})"]
    return "\n".join([*lines[:at], *check, *lines[at:]])


def _without_backend(text: str) -> str:
    """The method without the lines that leave a call with a named backend to a method of the host."""
    node = ast.parse(textwrap.dedent(text)).body[0]
    lines = text.split("\n")
    for n in node.body:  # type: ignore[attr-defined]
        if isinstance(n, ast.If) and ON_BACKEND in ast.unparse(n):
            del lines[n.lineno - 1 : n.end_lineno]
    return "\n".join(lines)


def _with_backend(text: str, host: str) -> str:
    """The method, which first leaves a call with a named backend to `host`."""
    node = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines, indent = text.split("\n"), "        "
    at = node.body[0].lineno - 1
    called = [*(x.arg for x in node.args.args[1:]), f"{BACKEND}={BACKEND}"]
    check = [f"{indent}if {BACKEND} is not None:", *_returned(host, called, f"{indent}    ")]
    return "\n".join([*lines[:at], *check, *lines[at:]])


def _methods(target: Target) -> dict[str, Any]:
    """The methods of our class that a fork's class gets, by name."""
    ours = registry.target_class(target)
    names = getattr(ours, "live_methods", ("forward",))
    if target.seam in ("leaf", "module") and hasattr(ours, "supports") and not hasattr(ours, CHECKS_CALLS):
        # A patch calls it once; a fork's class has instances of any configuration.
        names = ("supports", *names)
    return {name: getattr(ours, name) for name in names}


def _replaced(found: list[Target], fork: Fork | None) -> Replaced:
    """The classes that get the methods of one of ours."""
    target, *others = found
    ours = registry.target_class(target)
    methods = []
    assigned: dict[str, Key] = {}
    for name, function in _methods(target).items():
        module, _, owner = f"{function.__module__}.{function.__qualname__}".rpartition(".")[0].rpartition(".")
        if function.__module__.partition(".")[0] != PACKAGE:
            raise ExportError(f"{target.cls} has no method {name} of its own")
        if "." not in function.__qualname__:
            assigned[name] = origin(function.__module__, function.__qualname__, fork)
            continue
        source = read(module, fork)
        body = source.bound[owner].node.body  # type: ignore[attr-defined]
        node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        statement = Statement(node, (), source.at(first, 0), source.lines[node.end_lineno or 0] - 1)
        methods.append((source, statement, _uses(source, node)))
    for _, statement, _ in methods:
        _check_reads(ours, statement.node, {*_methods(target)})
    about = (ours.__doc__ or "").strip().partition("\n")[0]
    dispatched = target.seam == "leaf" and target.host in DISPATCHERS
    paths = tuple(t.path for t in others)
    return Replaced(
        target.cls, target.path, target.path.partition(":")[2], about, methods, dispatched, paths, assigned
    )  # fmt: skip


def _check_reads(ours: Any, method: ast.stmt, kept: set[str]) -> None:
    """Raises ExportError if the method reads an attribute of our class that the fork's class does not get.

    Attributes of instances are the host's: its constructor sets them.
    """
    assert isinstance(method, ast.FunctionDef)
    owners = {name: c for c in reversed(ours.__mro__) if _is_ours(c) for name in vars(c)}
    first = next((a.arg for a in (*method.args.posonlyargs, *method.args.args)), None)
    for n in ast.walk(method):
        if not (isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == first):
            continue
        if n.attr in owners and n.attr not in kept and isinstance(n.ctx, ast.Load):
            raise ExportError(
                f"{ours.__name__}.{method.name} reads {first}.{n.attr} of {owners[n.attr].__name__}, which a fork's"
                " class does not have: make it a function, or name it in live_methods"
            )


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == PACKAGE


def _class_text(
    r: Replaced, names: dict[Key, str], namespace: str, written: dict[str, str], falls_back: bool
) -> str:
    """The class; a method that an earlier class has word for word is taken from there (`written`)."""
    text = f"\n\nclass {r.name}({_host_name(r.path)}):\n"
    if r.about:
        text += f'    """{r.about}"""\n'
    names_of_methods = [statement.node.name for _, statement, _ in r.methods]  # type: ignore[attr-defined]
    if r.others:  # methods that several classes have cannot use super()
        text += "".join(
            f"    host_{m} = {_host_name(r.path)}.{m}\n" for m in names_of_methods if m != "supports"
        )
    text += "".join(f"    {m} = {names[key]}\n" for m, key in r.assigned.items())
    for source, statement, uses in r.methods:
        method, name = _copied(source, statement, uses, names, namespace), statement.node.name  # type: ignore[attr-defined]
        if name == "supports":
            method = re.sub(
                r' *@staticmethod\n|(?<=\n) +"""[^\n]*"""\n', "", method
            )  # called as a method here
        host = f"self.host_{name}" if r.others else f"super().{name}"
        if name != "supports":
            bare = _without_backend(method)
            named, method = bare != method, bare
            if falls_back and all(u.key is None or u.key[0] != LAYER for u in uses.uses):
                method = _with_fallback(method, host, r.supports)
            elif r.supports:
                method = _with_check(method, host)
            if named:
                method = _with_backend(method, host)
        if method in written and "super()" not in method:
            text += f"\n    {name} = {written[method]}.{name}\n"
        else:
            written[method] = r.name
            text += f"\n{method}\n"
    for path in r.others:
        name, host = path.partition(":")[2], _host_name(path)
        text += f"\n\nclass {name}({host}):\n"
        for m in (*r.assigned, *names_of_methods):
            both = f"    {m}, host_{m} = {r.name}.{m}, {host}.{m}\n"
            text += f"    supports = {r.name}.supports\n" if m == "supports" else both
    return text


def _header(
    spec: OpSpec, found: list[Target], host: str, version: str, namespace: str, parts: dict[str, Part],
    replaced: list[Replaced], fork: Fork | None,
) -> str:  # fmt: skip
    titles = ", ".join(dict.fromkeys(t.path.partition(":")[2] for t in found)) or f"The function {spec.name}"
    module = registry.op_modules()[spec.name]
    docstring = (ast.get_docstring(ast.parse(read(module).raw)) or spec.name).splitlines()[0]
    modules = {module, *(t.module for t in found)}
    files = sorted(f"{name.replace('.', '/')}.py" for name in modules)
    cuda = f"{PACKAGE}.core.cuda_rtc" in parts
    functions = FUNCTIONS if found else "Calls that the kernel does not support raise Unsupported."
    place = [PLACE] if found else []
    return HEADER.format(
        names=titles, host=host, version=version, docstring=docstring, own=__version__, op=spec.name,
        files=", ".join(files), namespace=namespace,
        needs=f"torch{', cuda-bindings' if cuda else ''} and triton",
        form="\n".join([FORK if replaced else functions, *place]) if fork else STANDALONE,
    )  # fmt: skip


def _keys(uses: Uses) -> list[Key]:
    return [*(u.key for u in uses.uses if u.key is not None), *sorted(uses.called)]


def _uses(source: Source, node: ast.AST) -> Uses:
    uses = Uses(source)
    uses.visit(node)
    return uses


def _reach(roots: list[Key], fork: Fork | None) -> dict[str, Part]:
    """Every statement that the roots need, by module."""
    parts: dict[str, Part] = {}
    todo = list(roots)
    while todo:
        module, name = todo.pop()
        part = parts.setdefault(module, Part(read(module, fork)))
        todo += _take(part, part.source.bound[name])
        if not todo:
            todo = [key for p in list(parts.values()) for key in _side_effects(p)]
    return parts


def _take(part: Part, statement: Statement) -> list[Key]:
    if statement.start in part.taken:
        return []
    uses = _uses(part.source, statement.node)
    part.taken[statement.start] = (statement, uses)
    return _keys(uses)


def _side_effects(part: Part) -> list[Key]:
    """Take the statements outside definitions that act on taken names: functions that set them, and registrations.

    A statement that binds nothing is taken when everything that it names in its module is taken.
    """
    more: list[Key] = []
    taken = {name for statement, _ in part.taken.values() for name in statement.names}
    for statement in part.source.statements:
        if statement.start in part.taken or _is_docstring(statement.node):
            continue
        if statement.assigned & taken:
            more += _take(part, statement)
        elif not statement.names:
            uses = _uses(part.source, statement.node)
            named = {u.key[1] for u in uses.uses if u.key is not None and u.key[0] == part.source.name}
            if named and named <= taken:
                more += _take(part, statement)
    return more


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _order(parts: dict[str, Part]) -> list[str]:
    """Modules, each after those that it needs at import."""
    done: list[str] = []

    def visit(module: str, above: tuple[str, ...]) -> None:
        if module in done or module in above:
            return
        for needed in parts[module].needs:
            visit(needed, (*above, module))
        done.append(module)

    for module in sorted(parts, key=lambda m: (m not in PLAIN, m)):
        visit(module, ())
    return done


def _host_names(found: list[Target], fork: Fork | None) -> dict[Key, list[str]]:
    """{our class: the host's names for it}; the first becomes its name, the others are aliases."""
    names: dict[Key, list[str]] = {}
    for target in found:
        known = names.setdefault(origin(target.module, target.cls, fork), [])
        name = target.path.partition(":")[2]
        if name not in known:
            known.append(name)
    return names


def _final_names(
    parts: dict[str, Part], order: list[str], own: str, aliases: dict[Key, list[str]]
) -> dict[Key, str]:
    names = {key: host_names[0] for key, host_names in aliases.items()}
    taken = {name for host_names in aliases.values() for name in host_names} | set(dir(builtins))
    taken |= {a for p in parts.values() for _, uses in p.taken.values() for a in uses.external}
    for module in sorted(order, key=lambda m: m != own):  # the op's own names first
        for statement, _ in parts[module].statements():
            for name in statement.names:
                if (module, name) in names:
                    continue
                free = name if name not in taken else f"{name}_{module.rpartition('.')[2]}"
                if free in taken:
                    raise ExportError(f"{module}: {name} and {free} are both taken by other definitions")
                names[(module, name)] = free
                taken.add(free)
    return names


def _external(parts: dict[str, Part], replaced: list[Replaced], imported: list[str]) -> list[str]:
    """The import lines of what is used, sorted; one name may not mean two things."""
    lines: dict[str, set[str]] = {}
    used = [(part.source, uses) for part in parts.values() for _, uses in part.taken.values()]
    used += [(source, uses) for r in replaced for source, _, uses in r.methods]
    for source, uses in used:
        for alias in sorted(uses.external):
            here = source.external[alias]
            before = lines.setdefault(alias, set(here))
            if before != here and any(" as " in line or line.startswith("from") for line in before | here):
                raise ExportError(
                    f"{alias} is imported as {sorted(before)} and, in {source.name}, {sorted(here)}"
                )
            before |= here
    for path in imported:
        module, _, name = path.partition(":")
        lines[_host_name(path)] = {f"from {module} import {name} as {_host_name(path)}"}
    return _grouped({line for group in lines.values() for line in group})


def _grouped(lines: set[str]) -> list[str]:
    """Import lines, the standard library's first, those from one module joined."""
    plain = sorted(line for line in lines if line.startswith("import"))
    joined: dict[str, list[str]] = {}
    for line in sorted(lines - set(plain)):
        module, _, name = line.partition(" import ")
        joined.setdefault(module, []).append(name)
    every = [*plain, *(f"{module} import {', '.join(found)}" for module, found in sorted(joined.items()))]
    own = [line for line in every if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return [*own, "", *(line for line in every if line not in own)]


def _copied(source: Source, statement: Statement, uses: Uses, names: dict[Key, str], namespace: str) -> str:
    """The statement's text with every name in its final form."""
    edits = [(u.start, u.end, names[u.key] if u.key is not None else "pass") for u in uses.uses]
    node = statement.node
    if (
        isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and (source.name, node.name) in names
        and statement.names
    ):
        final = names[(source.name, node.name)]
        at = source.raw.index(node.name.encode(), source.at(node.lineno, node.col_offset))
        edits.append((at, at + len(node.name.encode()), final))
    for match in NAMESPACE.finditer(source.raw, statement.start, statement.end):
        edits.append((match.start(), match.end(), namespace))
    out, at = [], statement.start
    for start, end, text in sorted(set(edits)):
        if start < at:
            continue
        out += [source.raw[at:start], text.encode()]
        at = end
    out.append(source.raw[at : statement.end])
    return re.sub(r"\n[ \t]*(?=\n)", "\n", b"".join(out).decode())


def _attributes(parts: dict[str, Part], replaced: list[Replaced]) -> set[str]:
    """Names that are accessed as attributes anywhere in the file, the plain modules' classes excluded."""
    statements = [s for name, p in parts.items() for s, _ in p.statements()
                  if name not in PLAIN or not isinstance(s.node, ast.ClassDef)]  # fmt: skip
    statements += [s for r in replaced for _, s, _ in r.methods]
    return {name for statement in statements for name in statement.attributes}
