"""The structure of the repository: its size, direction of imports, private names, import circles."""

from __future__ import annotations

import ast
import subprocess
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"fastkernels": ROOT, "fk_integrations": ROOT / "integrations", "fk_bench": ROOT / "bench"}
MOST_BYTES = 7_000_000  # of the tracked files, each compressed
INIT_LINES = 3  # of the docstring of an __init__.py

HOSTS = {"vllm", "sglang", "diffusers", "timm", "sgl_kernel", "flashinfer", "flash_attn"}
# Only the host itself imports these modules, so they may subclass its classes.
LOADED_BY_HOST = {
    "fk_integrations.vllm.passes.compiler_pass": "vllm",
    "fk_bench.quality.engines.vllm_forced": "vllm",
    # never imported: the exporter copies its text into a file for a fork
    "fastkernels.export.plain.fork_attention": "diffusers",
    "fastkernels.export.plain.scaled_mm_vllm": "vllm",
    "fastkernels.export.plain.scaled_mm_sglang": "sglang",
}
# A host that is a dependency of the library is imported inside functions, too.
LAZY = {"transformers"}
MAY_IMPORT = {
    "fastkernels": {"fastkernels"},
    "fk_integrations": {"fastkernels", "fk_integrations"},
    "fk_bench": {"fastkernels", "fk_integrations", "fk_bench"},
}
NEVER = {
    "fastkernels.core": (
        "fastkernels.overrides", "fastkernels.models", "fastkernels.engine", "fastkernels.export",
        "fastkernels.capture", "fastkernels.patch",
    ),
    "fastkernels.overrides": ("fastkernels.models", "fastkernels.engine", "fastkernels.patch"),
    "fastkernels.models": ("fastkernels.engine", "fastkernels.patch"),
}  # fmt: skip


class Import(NamedTuple):
    """One imported name: `import a.b` has no name; `from a.b import c` has name c. `top` means outside functions."""

    origin: str
    name: str
    line: int
    top: bool
    bound: str  # the name that it has in the file

    @property
    def full(self) -> str:
        return f"{self.origin}.{self.name}" if self.name else self.origin


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((folder / package).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def folder_of(module: str) -> str:
    """The dotted folder that a module's file lies in."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(module: str, file: Path, typing: bool = False) -> tuple[Import, ...]:
    """All imports of a file, those inside functions included; with `typing`, also those for type checkers only."""
    return tuple(_imports(module, file, typing))


def _imports(module: str, file: Path, typing: bool) -> Iterator[Import]:
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[tuple[ast.AST, bool]] = [(parsed(file), True)]
    while todo:
        node, top = todo.pop()
        if isinstance(node, ast.Import):
            yield from (Import(a.name, "", node.lineno, top, a.asname or a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(origin, a.name, node.lineno, top, a.asname or a.name) for a in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, top and not inside) for child in ast.iter_child_nodes(node))


def imported_module(found: Import) -> str | None:
    """The module of this project that an import loads."""
    return next((name for name in (found.full, found.origin) if name in modules()), None)


def test_repository_is_small() -> None:
    """Clones and copies to other machines stay quick: code, rows of results and generated pages together."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    files = [f for f in listed.split("\0") if f and (ROOT / f).is_file()]
    sizes = {f: len(zlib.compress((ROOT / f).read_bytes())) for f in files}
    largest = sorted(sizes, key=lambda f: -sizes[f])[:10]
    assert sum(sizes.values()) < MOST_BYTES, "\n".join(f"{sizes[f]:>9,} {f}" for f in largest)


def test_packages_say_what_they_contain() -> None:
    """Every __init__.py has a docstring of one to three lines."""
    wrong = []
    for file in (f for f in modules().values() if f.name == "__init__.py"):
        docstring = ast.get_docstring(parsed(file)) or ""
        lines = len(docstring.splitlines())
        if not 1 <= lines <= INIT_LINES:
            wrong.append(f"{file.relative_to(ROOT)}: {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_no_file_only_reexports() -> None:
    wrong = []
    for file in (f for f in modules().values() if f.name != "__init__.py"):
        body = [n for n in parsed(file).body if not isinstance(n, ast.Expr)]
        names = [n for n in body if not isinstance(n, (ast.Import, ast.ImportFrom))]
        if all(isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__" for n in names):
            wrong.append(str(file.relative_to(ROOT)))
    assert not wrong, "\n".join(wrong)


def private_uses(module: str, file: Path) -> Iterator[str]:
    """Private names of other folders that a file imports, or reads from a module that it imports."""
    known: dict[str, str] = {}
    for found in imports(module, file):
        origin = imported_module(found)
        if origin is None:
            continue
        parts = found.full.split(".")
        private = next((i for i, p in enumerate(parts) if p.startswith("_") and not p.startswith("__")), None)
        outside = folder_of(origin) != folder_of(module)
        if private is not None and outside:
            yield f"{file.relative_to(ROOT)}:{found.line} imports {found.full}"
        if outside and origin == found.full:
            known[found.bound] = origin
    for node in ast.walk(parsed(file)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if ast.unparse(node.value) in known:
            yield f"{file.relative_to(ROOT)}:{node.lineno} reads {ast.unparse(node)}"


def test_private_names_stay_in_their_folder() -> None:
    wrong = [use for module, file in modules().items() for use in private_uses(module, file)]
    assert not wrong, "\n".join(wrong)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_no_import_circles() -> None:
    graph = {
        module: {other for i in imports(module, file) if (other := imported_module(i)) and other != module}
        for module, file in modules().items()
    }
    found = circles(graph)
    assert not found, "\n".join(" <-> ".join(c) for c in found)


def _under(parent: str, parts: str) -> set[str]:
    """The folders `parent.PART`."""
    return {f"{parent}.{part}" for part in parts.split()}


# Folders that still import each other. A group may lose folders; a new circle, or another folder in one, fails.
CIRCLES_OF_FOLDERS: tuple[set[str], ...] = (_under("fastkernels.overrides", "activation linear"),)


def folder_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {folder_of(module): set() for module in modules()}
    for module, file in modules().items():
        if module in PACKAGES:
            continue  # only names what users import
        found = (imported_module(i) for i in imports(module, file, typing=True))
        graph[folder_of(module)] |= {folder_of(other) for other in found if other} - {folder_of(module)}
    return graph


def test_no_new_circles_of_folders() -> None:
    found = circles(folder_graph())
    new = [c for c in found if not any(set(c) <= known for known in CIRCLES_OF_FOLDERS)]
    assert not new, "\n".join(" <-> ".join(c) for c in new)


def test_known_circles_of_folders_remain() -> None:
    """A group without a circle leaves the list."""
    found = {folder for circle in circles(folder_graph()) for folder in circle}
    gone = [sorted(known - found) for known in CIRCLES_OF_FOLDERS if known - found]
    assert not gone, gone


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert circles(graph) == [["a", "b", "c"]]


def wrong_directions(module: str, file: Path) -> Iterator[str]:
    package = module.partition(".")[0]
    for found in imports(module, file):
        name, origin = found.full, found.origin.partition(".")[0]
        if origin in MAY_IMPORT and origin not in MAY_IMPORT[package]:
            yield f"{module} imports {name}"
        for part, banned in NEVER.items():
            if f"{module}.".startswith(f"{part}.") and any(f"{name}.".startswith(f"{b}.") for b in banned):
                yield f"{module} imports {name}"
        allowed = origin not in LAZY and (origin not in HOSTS or LOADED_BY_HOST.get(module) == origin)
        if found.top and not allowed:
            yield f"{module} imports {name} at its top level"


def test_direction() -> None:
    wrong = [line for module, file in modules().items() for line in wrong_directions(module, file)]
    assert not wrong, "\n".join(wrong)


def test_wrong_directions_are_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import vllm\nimport transformers\nimport fk_bench.cli\nimport fastkernels.patch\n")
    assert len([*wrong_directions("fastkernels.core.x", file)]) == 4


def test_imports_are_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from ..models import llama\nif TYPE_CHECKING:\n    import vllm\ndef f():\n    import sglang\n"
        "try:\n    import vllm.x\nexcept ImportError: pass\n"
    )
    assert {(i.full, i.top) for i in imports("fastkernels.overrides.x", file)} == {
        ("fastkernels.models.llama", True), ("sglang", False), ("vllm.x", True),
    }  # fmt: skip
