"""The registry finds ops, host files and targets, and imports nothing before its first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fastkernels.core import registry
from fastkernels.core.registry import DuplicateName, UnknownName

KNOWN = {"rms_norm", "silu_and_mul", "rotary_emb", "store_kvcache", "attention_prefill", "gated_mlp"}


def assigned_names(file: Path) -> set[str]:
    """The names that a module assigns at its top level."""
    tree = ast.parse(file.read_text())
    plain = {
        t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    typed = {
        n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    return plain | typed


def test_op_is_a_file_that_assigns_spec() -> None:
    files = {f.stem for f in registry.OPS_ROOT.rglob("*.py") if "SPEC" in assigned_names(f)}
    assert (
        {*registry.op_names(), *registry.collective_names()} == set(registry.op_modules()) == files >= KNOWN
    )
    assert not set(registry.op_names()) & set(registry.collective_names())
    assert [n for n in registry.op_modules() if registry.get(n).ranks] == registry.collective_names()


def test_host_file_is_a_file_that_assigns_targets() -> None:
    found = {f"{registry.OPS_PACKAGE}.{f.parent.name}.{f.stem}" for f in registry.OPS_ROOT.rglob("*.py")
             if "TARGETS" in assigned_names(f)}  # fmt: skip
    assert {module for modules in registry.host_modules().values() for module in modules} == found


def test_duplicate_op_name_names_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("norm", "quant"):
        (tmp_path / family).mkdir()
        (tmp_path / family / "same.py").write_text("SPEC = None\n")
    monkeypatch.setattr(registry, "OPS_ROOT", tmp_path)
    with pytest.raises(DuplicateName) as error:
        registry.op_modules.__wrapped__()
    assert f"{tmp_path / 'norm' / 'same.py'} and {tmp_path / 'quant' / 'same.py'}" in str(error.value)


def test_every_target_has_a_class() -> None:
    for name in registry.op_names():
        for target in registry.get(name).targets:
            assert callable(registry.target_class(target)), (name, target)
            assert registry.op_class(name, target.cls) is registry.target_class(target)


@pytest.mark.parametrize("name", registry.op_modules())
def test_spec_is_of_its_file(name: str) -> None:
    spec = registry.get(name)
    assert spec.name == name
    assert registry.op_modules()[name] == f"fastkernels.overrides.{registry.family(name)}.{name}"
    assert set(spec.calls) <= set(registry.op_modules())
    assert spec.op is None or spec.op.name == name
    assert len({c.name for c in spec.cases}) == len(spec.cases)
    assert all(c.dtype in spec.tolerance for c in spec.cases)


def test_unknown_op_error_names_the_closest_or_all() -> None:
    with pytest.raises(UnknownName) as error:
        registry.get("rmsnorm")
    text = str(error.value)
    assert text.startswith("unknown op 'rmsnorm'. Did you mean 'rms_norm'?") and "silu_and_mul" not in text
    with pytest.raises(UnknownName, match=r"'nope'\. Known: .*silu_and_mul"):
        registry.check_names(["rms_norm", "nope"])
    assert registry.check_names(iter(["rms_norm"])) == ("rms_norm",)


def test_import_loads_no_kernel_and_no_host() -> None:
    code = (
        "import sys, fastkernels; from fastkernels.core import registry; registry.op_names();"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'triton', 'vllm', 'sglang', 'transformers'}),"
        " [m for m in sys.modules if m.startswith('fastkernels.overrides')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "[] []", done.stdout + done.stderr
