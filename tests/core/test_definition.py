"""FlashInfer-Trace definitions of ops: valid, and their `run` is the reference."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import torch
from support.kernels.op_cases import make_args

from fastkernels.core import registry
from fastkernels.core.definition import axis_values, definition, table

NAMES = registry.op_names()
DTYPES = {
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8",
    "bool",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_definition_is_valid(name: str) -> None:
    found = definition(registry.get(name))
    json.dumps(found)
    assert found["axes"] and found["inputs"] and found["outputs"]
    for axis in found["axes"].values():
        assert axis == {"type": "var"} or (axis["type"] == "const" and axis["value"] > 0)
    for tensor in (*found["inputs"].values(), *found["outputs"].values()):
        assert set(tensor["shape"] or ()) <= set(found["axes"]) and tensor["dtype"] in DTYPES
    for constraint in found["constraints"]:
        ast.parse(constraint, mode="eval")


@pytest.mark.parametrize("name", NAMES)
def test_name_and_axes_fit_every_case(name: str) -> None:
    """Definitions with one name are equal, flashinfer-bench accepts them, and a case gives their sizes."""
    theirs = pytest.importorskip("flashinfer_bench").data.Definition
    spec, known = registry.get(name), {}
    for case in spec.cases:
        found = definition(spec, case)
        assert known.setdefault(found["name"], found) == found, case.name
        sizes = axis_values(spec, case) | {n: a["value"] for n, a in found["axes"].items() if "value" in a}
        declared = spec.declaration.sizes(case.dims, case.dtype)
        for tensor in spec.declaration.tensors.values():
            if tensor.there(declared):
                shape = found["inputs"][tensor.name]["shape"]
                assert tuple(sizes[n] for n in shape) == tensor.shape(declared)
        if not any(t["dtype"] == "uint8" for t in found["inputs"].values()):
            theirs.model_validate(found)


@pytest.mark.parametrize("name", NAMES)
def test_definition_runs_the_reference(name: str) -> None:
    spec = registry.get(name)
    for case in (c for c in spec.cases if "odd" in c.tags):
        found = definition(spec, case)
        scope: dict[str, Any] = {}
        exec(found["reference"], scope)
        args = make_args(spec, case)
        given = dict(zip((a.name for a in spec.arguments), args, strict=True))
        got = scope["run"](**{n: given[n] for n in found["inputs"]})
        want = spec.reference(*args)
        want = [t for t in (want if isinstance(want, tuple) else (want,)) if t is not None]
        got = list(got) if isinstance(got, tuple) else [got]
        assert len(found["outputs"]) == len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a.float(), b.float())


def test_definition_of_rms_norm() -> None:
    found = definition(registry.get("rms_norm"))
    assert found["name"] == "rms_norm_hidden4096_residual"
    assert found["axes"] == {"tokens": {"type": "var"}, "hidden": {"type": "const", "value": 4096}}
    assert found["inputs"]["weight"] == {"shape": ["hidden"], "dtype": "bfloat16"}
    assert found["inputs"]["eps"] == {"shape": None, "dtype": "float32"}
    assert list(found["outputs"]) == ["out", "new_residual"]


def test_table_lists_every_argument() -> None:
    spec = registry.get("rms_norm")
    text = table(spec)
    assert all(f"| {a.name} |" in text for a in (*spec.arguments, *spec.outputs))
    assert "| residual | [tokens, heads?, hidden] | the case's | if residual; overwritten |" in text
