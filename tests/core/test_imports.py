"""The import rule: overrides <- models <- engine; integrations -> fastkernels; bench -> both; hosts in functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"fastkernels": ROOT, "fk_integrations": ROOT / "integrations", "fk_bench": ROOT / "bench"}
HOSTS = {"vllm", "sglang", "diffusers", "timm", "sgl_kernel", "flashinfer", "flash_attn"}
# What only a host imports may be built on its classes.
INSIDE = {"fk_integrations.vllm.compiler_pass": "vllm"}
# A host that is the library's own dependency may be imported where it is used, but only inside functions.
LAZY = {"transformers"}
# What each part may import of this project, by the longest prefix that fits.
MAY_IMPORT = {
    "fastkernels": {"fastkernels"},
    "fk_integrations": {"fastkernels", "fk_integrations"},
    "fk_bench": {"fastkernels", "fk_integrations", "fk_bench"},
}
NEVER = {
    "fastkernels.overrides": ("fastkernels.models", "fastkernels.engine", "fastkernels.patch"),
    "fastkernels.models": ("fastkernels.engine", "fastkernels.patch"),
}


def _modules() -> list[tuple[str, Path]]:
    found = []
    for package, folder in PACKAGES.items():
        for file in sorted((folder / package).rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    return found


def imports(module: str, file: Path) -> Iterator[tuple[str, bool]]:
    """(absolute name, at the top level) of every import of a file; typing-only imports are left out."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    todo: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text()), True)]
    while todo:
        node, top = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((a.name, top) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{a.name}", top) for a in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        todo.extend((child, top and not inside) for child in ast.iter_child_nodes(node))


@pytest.mark.parametrize("module, file", _modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_direction(module: str, file: Path) -> None:
    package = module.partition(".")[0]
    for name, top in imports(module, file):
        origin = name.partition(".")[0]
        if origin in MAY_IMPORT:
            assert origin in MAY_IMPORT[package], f"{module} imports {name}"
        for part, banned in NEVER.items():
            if f"{module}.".startswith(f"{part}."):
                assert not any(f"{name}.".startswith(f"{b}.") for b in banned), f"{module} imports {name}"
        allowed = origin not in HOSTS or INSIDE.get(module) == origin
        assert allowed or not top, f"{module} imports {name} at its top level"
        assert origin not in LAZY or not top, f"{module} imports {name} at its top level"


def test_rule_sees_what_it_must(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from ..models import llama\nif TYPE_CHECKING:\n    import vllm\ndef f():\n    import sglang\n"
        "try:\n    import vllm.x\nexcept ImportError: pass\n"
    )
    assert set(imports("fastkernels.overrides.x", file)) == {
        ("fastkernels.models.llama", True), ("sglang", False), ("vllm.x", True),
    }  # fmt: skip


def _loaded(code: str, environ: dict[str, str] | None = None) -> set[str]:
    """Top-level packages, and our modules, that a fresh interpreter has after `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    env = {"PATH": "/usr/bin:/bin", **(environ or {})}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env, cwd="/"
    )
    assert out.returncode == 0, out.stderr
    names = set(out.stdout.split())
    return {n.partition(".")[0] for n in names} | {n for n in names if n.startswith(("fastkernels", "fk_"))}


def test_import_of_the_library_is_light() -> None:
    loaded = _loaded("import fastkernels")
    assert not loaded & {"torch", "triton", "transformers", "numpy", "fk_bench", "fk_integrations", *HOSTS}
    assert not any(n.startswith("fastkernels.overrides") for n in loaded)


def test_registry_names_import_nothing() -> None:
    loaded = _loaded("from fastkernels.core import registry; assert 'rms_norm' in registry.op_names()")
    assert not loaded & {"torch", "triton", "transformers", *HOSTS}


def test_patch_imports_no_kernel_and_no_host() -> None:
    loaded = _loaded("from fastkernels import patch, patch_async, Report")
    assert not loaded & {"triton", "fk_bench", "fk_integrations", *HOSTS}


def test_an_op_imports_no_host_and_no_other_level() -> None:
    loaded = _loaded("from fastkernels.core import registry; registry.get('rms_norm')")
    assert "torch" in loaded
    assert not loaded & {"transformers", "fk_bench", "fk_integrations", *HOSTS}
    assert not any(n.startswith(("fastkernels.models", "fastkernels.engine")) for n in loaded)


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_a_sleeping_plugin_imports_no_torch(host: str) -> None:
    """The entry point's module itself; what it then does needs the host."""
    loaded = _loaded(f"from fk_integrations import plugin; plugin.{host}")
    assert not loaded & {"torch", "triton", "fk_bench", *HOSTS}
