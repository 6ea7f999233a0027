"""One self-contained file for a fork: an op's classes for one host version, with all that they need of this package.

The file is put together from the source by AST: every definition that the host's classes reach is taken over as it
is written, comments included; imports of this package vanish, names that collide get their module's as a suffix,
our class takes the host's name, and the functional ops move to a namespace of their own.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass, field

from fastkernels import __version__
from fastkernels.core import registry
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export.source import PACKAGE, ExportError, Key, Source, Statement, Use, Uses, origin, read

NAMESPACE = re.compile(rb'(?<=")fastkernels(?=")|\bfastkernels(?=::)|(?<=\bops\.)fastkernels\b')
HEADER = '''\
# SPDX-License-Identifier: Apache-2.0
"""{names} for {host} {version}, exported from FastKernels {own} (op {op}).

{docstring}

Self-contained: needs torch and triton. The functional ops are torch.ops.{namespace}.*, so that this file
can live beside an installed FastKernels.
"""

from __future__ import annotations

'''


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


def targets(spec: OpSpec, host: str, version: str) -> list[Target]:
    """The op's targets in that host version; none for a purely functional op. Raises ExportError that lists them."""
    found = spec.targets_for(host, version)
    if not found and spec.targets:
        there = sorted({f"{t.host} {t.versions}".strip() for t in spec.targets})
        raise ExportError(
            f"{spec.name} has no class for {host} {version}. It has: {', '.join(there) or 'none'}"
        )
    return found


def export(op: str, host: str, version: str) -> str:
    """The text of the self-contained file. Raises UnknownName for the op, ExportError for the host or version."""
    spec = registry.get(op)
    found = targets(spec, host, version)
    module = registry.op_modules()[op]
    roots = [origin(t.module, t.cls) for t in found]
    roots += [(module, name) for name in ("reference", op) if name in read(module).bound]
    parts = _reach(roots)
    order = _order(parts)
    aliases = _host_names(found)
    names = _final_names(parts, order, module, aliases)
    namespace = f"{PACKAGE}_{op}_{host}"
    title = ", ".join(dict.fromkeys(t.path.partition(":")[2] for t in found)) or f"The function {op}"
    docstring = (ast.get_docstring(ast.parse(read(module).raw)) or op).splitlines()[0]
    text = HEADER.format(
        names=title,
        host=host,
        version=version,
        docstring=docstring,
        own=__version__,
        op=op,
        namespace=namespace,
    )
    text += "\n".join(_external(parts)) + "\n"
    wide = True  # two blank lines around a definition, none between plain statements
    for name in order:
        for statement, uses in parts[name].statements():
            definition = isinstance(statement.node, (ast.ClassDef, ast.FunctionDef))
            text += ("\n\n" if definition or wide else "") + _rewritten(
                parts[name].source, statement, uses, names, namespace
            )
            text, wide = text + "\n", definition
    for first, *others in aliases.values():
        text += "".join(f"\n{other} = {first}\n" for other in others)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    compile(text, f"{op}.py", "exec")
    return text


def _reach(roots: list[Key]) -> dict[str, Part]:
    """Every statement that the roots need, by module."""
    parts: dict[str, Part] = {}
    todo = list(roots)
    while todo:
        module, name = todo.pop()
        part = parts.setdefault(module, Part(read(module)))
        statement = part.source.bound[name]
        todo += _take(part, statement)
        if not todo:
            todo = [key for p in list(parts.values()) for key in _side_effects(p)]
    return parts


def _take(part: Part, statement: Statement) -> list[Key]:
    if statement.start in part.taken:
        return []
    uses = Uses(part.source)
    uses.visit(statement.node)
    part.taken[statement.start] = (statement, uses)
    return [*(u.key for u in uses.uses if u.key is not None), *sorted(uses.called)]


def _side_effects(part: Part) -> list[Key]:
    """Take what reaches taken names from outside: functions that set them, and statements that bind nothing.

    A statement that binds nothing (a registration) is taken when all that it names of its module is.
    """
    more: list[Key] = []
    taken = {name for statement, _ in part.taken.values() for name in statement.names}
    for statement in part.source.statements:
        if statement.start in part.taken or _is_docstring(statement.node):
            continue
        sets = {
            name for node in ast.walk(statement.node) if isinstance(node, ast.Global) for name in node.names
        }
        if sets & taken:
            more += _take(part, statement)
        elif not statement.names:
            uses = Uses(part.source)
            uses.visit(statement.node)
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

    for module in sorted(parts):
        visit(module, ())
    return done


def _host_names(found: list[Target]) -> dict[Key, list[str]]:
    """{our class: the host's names for it}; the first becomes its name, the others are aliases."""
    names: dict[Key, list[str]] = {}
    for target in found:
        known = names.setdefault(origin(target.module, target.cls), [])
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


def _external(parts: dict[str, Part]) -> list[str]:
    """The import lines of what is used, sorted; one name may not mean two things."""
    lines: dict[str, set[str]] = {}
    for part in parts.values():
        for alias in sorted({a for _, uses in part.taken.values() for a in uses.external}):
            here = part.source.external[alias]
            before = lines.setdefault(alias, set(here))
            if before != here and any(" as " in line or line.startswith("from") for line in before | here):
                raise ExportError(
                    f"{alias} is imported as {sorted(before)} and, in {part.source.name}, {sorted(here)}"
                )
            before |= here
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


def _rewritten(
    source: Source, statement: Statement, uses: Uses, names: dict[Key, str], namespace: str
) -> str:
    edits = [(u.start, u.end, _replacement(u, names)) for u in uses.uses]
    node = statement.node
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
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
    return b"".join(out).decode()


def _replacement(use: Use, names: dict[Key, str]) -> str:
    return "pass" if use.key is None else names[use.key]
