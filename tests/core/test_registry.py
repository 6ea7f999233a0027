"""Ops are found by file name, and nothing is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fastkernels
from fastkernels.core import registry
from fastkernels.core.registry import UnknownName

L1 = ("rms_norm", "silu_and_mul", "rotary_emb", "store_kvcache", "attention_prefill", "attention_decode")


def test_an_op_is_a_file() -> None:
    root = Path(fastkernels.__file__).parent / "overrides"
    files = {f.stem for level in ("l1", "l2", "l3") for f in (root / level).glob("*.py") if f.stem[0] != "_"}
    assert set(registry.op_names()) == files >= set(L1)


@pytest.mark.parametrize("name", registry.op_names())
def test_spec_is_of_its_file(name: str) -> None:
    spec = registry.get(name)
    assert spec.name == name
    assert registry.op_modules()[name] == f"fastkernels.overrides.l{spec.level}.{name}"
    assert set(spec.calls) <= set(registry.op_names())
    assert spec.op is None or spec.op.name == name
    assert len({c.name for c in spec.cases}) == len(spec.cases)
    assert all(c.dtype in spec.tolerance for c in spec.cases)


def test_an_unknown_op_is_named_with_what_exists() -> None:
    with pytest.raises(UnknownName) as error:
        registry.get("rmsnorm")
    text = str(error.value)
    assert text.startswith("unknown op 'rmsnorm'. Did you mean 'rms_norm'?") and "silu_and_mul" in text
    with pytest.raises(UnknownName, match="'nope'"):
        registry.check_names(["rms_norm", "nope"])
    assert registry.check_names(iter(["rms_norm"])) == ("rms_norm",)


def test_importing_fastkernels_imports_no_kernel_and_no_host() -> None:
    code = (
        "import sys, fastkernels; from fastkernels import registry; registry.op_names();"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'triton', 'vllm', 'sglang', 'transformers'}),"
        " [m for m in sys.modules if m.startswith('fastkernels.overrides')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] []", done.stdout + done.stderr
