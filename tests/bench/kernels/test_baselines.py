"""Baselines: each available one matches the op and overwrites only what it declares; the others give a reason."""

import subprocess
import sys

import pytest
import torch
from fk_bench.core.baselines import AGAINST, baselines

from fastkernels.core import registry

OPS = [name for name in registry.op_names() if registry.get(name).op is not None]


def _outputs(spec, args, result):
    """The op's outputs, then its mutated arguments."""
    found = [] if result is None else list(result) if isinstance(result, (tuple, list)) else [result]
    schema = spec.op.overload._schema.arguments
    written = [i for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write]
    return [*found, *(args[i] for i in written if i < len(args) and args[i] is not None)], written


def _copies(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("name", OPS)
def test_available_baselines_match_the_op(name):
    spec, ran = registry.get(name), 0
    reference = baselines(name, "reference", "cpu")[0].make()
    for baseline in baselines(name, "production", "cpu"):
        if baseline.available() is not None:
            assert baseline.name in baseline.available() and "not" in baseline.available()
            continue
        fn = baseline.make()
        for case in (c for c in spec.cases if "odd" in c.tags):
            args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
            refusal = baseline.supports(*args)
            if refusal is not None:
                assert refusal, (baseline.name, case.name)
                continue
            used, wanted = _copies(args), _copies(args)
            got, written = _outputs(spec, used, fn(*used))
            want, _ = _outputs(spec, wanted, reference(*wanted))
            assert len(got) == len(want)
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                assert g.shape == w.shape and g.dtype == w.dtype
                if i not in baseline.unchecked:
                    own = str(g.dtype).removeprefix("torch.")
                    key = own if own in spec.tolerance and own.startswith("float8") else case.dtype
                    tolerance = spec.tolerance[key] if g.is_floating_point() else None
                    atol, rtol = (2 * tolerance.atol, 2 * tolerance.rtol) if tolerance else (0, 0)
                    torch.testing.assert_close(g.double(), w.double(), atol=atol, rtol=rtol, equal_nan=True)
            for i, (before, after) in enumerate(zip(args, used, strict=True)):
                if isinstance(before, torch.Tensor) and i not in (*written, *baseline.overwrites):
                    assert torch.equal(
                        before.flatten().view(torch.uint8), after.flatten().view(torch.uint8)
                    ), i
            ran += 1
    assert ran


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_gpu_baseline(name):
    found = baselines(name, "production", "cuda")
    assert any(b.kind != "reference" for b in found)
    assert all(b.device == "cuda" and "cuda" in b.devices for b in found)
    assert len({b.name for b in found}) == len(found)
    assert all(bool(b.differs) == bool(b.unchecked) for b in found)


def test_against_selects_baselines():
    kinds = {against: {b.kind for b in baselines("rms_norm", against, "cuda")} for against in AGAINST}
    assert kinds["host"] == {"host"} and kinds["reference"] == {"reference"}
    assert {"host", "library", "compiler"} <= kinds["production"]
    assert baselines("gated_mlp", "production", "cuda") == []  # calls other ops, and has no function
    with pytest.raises(ValueError, match="against 'me'"):
        baselines("rms_norm", "me", "cpu")
    with pytest.raises(registry.UnknownName, match="rms_norm"):
        baselines("rms_nrom", "host", "cpu")


def test_missing_measurements_are_reported():
    missing = [b.available() for b in baselines("attention_decode", "host", "cuda")]
    assert missing and all("vllm" in reason for reason in missing if reason)
    reason = next(b for b in baselines("rms_norm", "production", "cuda") if b.name == "flashinfer").supports(
        torch.zeros(2, 8), torch.ones(8), 1e-5
    )
    assert "float16 or bfloat16" in reason and "float32" in reason


def test_libraries_are_imported_at_first_call():
    code = (
        "import sys, fk_bench.core.baselines as b; b.baselines('rms_norm', 'production', 'cuda')\n"
        "print([m for m in ('vllm', 'sglang', 'sgl_kernel', 'flashinfer', 'fla', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
