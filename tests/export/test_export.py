"""Exported files: alone, without this package, they compute what our classes compute."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import exported as runner
import pytest
import torch
from fk_integrations.core import signature_diff as compare

from fastkernels.core import forward_context, registry
from fastkernels.core.spec import OpSpec, Target
from fastkernels.export.file import ExportError, export

RUNNER = Path(runner.__file__)
VERSIONS = [(host, version) for host in compare.hosts() for version in compare.versions(host)]
BETWEEN = (("sglang", "0.5.17"), ("vllm", "0.32.0"))  # neither the one that was measured nor the newest
exported = cache(export)


def _targets(spec: OpSpec, host: str, version: str) -> list[Target] | None:
    """The op's targets there, [] for a purely functional op, None if it is not for that host version."""
    found = spec.targets_for(host, version)
    return None if spec.targets and not found else found


def _ours(spec: OpSpec, host: str, found: list[Target]) -> Any:
    classes = {t.path.partition(":")[2]: registry.target_class(t) for t in found}
    # A host's function may have our op's name.
    names = classes if spec.op is None else {spec.name: spec.op, **classes}
    return SimpleNamespace(
        classes=list(classes), host=host, **names,
        AttentionMetadata=forward_context.AttentionMetadata, forward_context=forward_context.forward_context,
    )  # fmt: skip


def _inputs(spec: OpSpec) -> list[Any] | None:
    if any(t.path.partition(":")[2] == spec.name for t in spec.targets):
        return None  # the name is the host's function in the file, which the exercise calls
    case = next((c for c in spec.cases if "odd" in c.tags), spec.cases[0])
    return spec.inputs(case, "cpu", torch.Generator().manual_seed(3)) if spec.op is not None else None


def _same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _same(x, y)
    else:
        assert a == b or (a is None and b is None)


@pytest.mark.parametrize(
    "host, version",
    [pytest.param(*v, marks=[pytest.mark.slow] if v in BETWEEN else []) for v in VERSIONS],
    ids=lambda v: v,
)
def test_exported_files_run_alone(host: str, version: str, tmp_path: Path) -> None:
    """All ops of a host version, each from its own file, side by side in one process."""
    namespaces, inputs = {}, {}
    for name in registry.op_names():
        spec = registry.get(name)
        found = _targets(spec, host, version)
        if found is None:
            continue
        assert not found or name in runner.EXERCISES, f"tests/support/exported.py has no exercise for {name}"
        text = exported(name, host, version)
        (tmp_path / f"{name}.py").write_text(text)
        namespaces[name] = _ours(spec, host, found)
        made = _inputs(spec)
        if made is not None:
            inputs[name] = made
    classes = {name: ns.classes for name, ns in namespaces.items()}
    torch.save({"host": host, "classes": classes, "inputs": inputs}, tmp_path / "inputs.pt")
    command = [sys.executable, "-I", str(RUNNER), str(tmp_path)]
    # Sums over a row depend on how many threads share it.
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd="/", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = torch.load(tmp_path / "outputs.pt", weights_only=False)
    ours = runner.run(namespaces, inputs)
    assert set(theirs) == set(ours) == set(namespaces)
    for name, outputs in ours.items():
        assert outputs, f"{name}: nothing was compared"
        _same(outputs, theirs[name])


CASES = [
    (name, host, version)
    for name in registry.op_names()
    for host, version in VERSIONS
    if _targets(registry.get(name), host, version) is not None
]


@pytest.mark.parametrize("name, host, version", CASES, ids=lambda v: v)
def test_exported_file_is_self_contained(name: str, host: str, version: str) -> None:
    """Nothing but torch, triton and the standard library is imported when it is; no host at all; same text twice."""
    text = exported(name, host, version)
    assert text == export(name, host, version)
    tree = ast.parse(text, feature_version=(3, 10))
    bound = {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    bound |= {
        t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    for target in registry.get(name).targets_for(host, version):
        assert target.path.partition(":")[2] in bound
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for origin in (n.partition(".")[0] for n in names):
            assert origin not in runner.BANNED and origin != ""
            at_top = node in tree.body
            assert not at_top or origin in {"torch", "triton", *sys.stdlib_module_names}, origin
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


def _python(version: str) -> str | None:
    """An interpreter of that version that runs: on the path, or pyenv's."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for python in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", ["3.10", pytest.param("3.13", marks=pytest.mark.slow)])
def test_exported_files_parse_under(version: str, tmp_path: Path) -> None:
    python = _python(version)
    if python is None:
        pytest.skip(f"there is no python{version}")
    for name, host, host_version in CASES:
        (tmp_path / f"{name}_{host}_{host_version}.py").write_text(exported(name, host, host_version))
    code = "import pathlib, sys\nfor f in pathlib.Path(sys.argv[1]).glob('*.py'): compile(f.read_text(), f, 'exec')"
    done = subprocess.run([python, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_host_version_without_the_op_is_said() -> None:
    with pytest.raises(ExportError, match=r"rms_norm has no class for timm 1.0. It has: .*vllm"):
        export("rms_norm", "timm", "1.0")
    with pytest.raises(registry.UnknownName, match=r"rms_nom.*Did you mean 'rms_norm'"):
        export("rms_nom", "vllm", "0.33.0")
