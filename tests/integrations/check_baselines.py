"""Kernels of the host as baselines of recurrences, in Triton's interpreter: they compute what the ops do."""

import dataclasses
import os

import pytest
import torch
from support.hosts.interpreted import adapt, prepare
from support.kernels.op_cases import call, make_args, mismatch, oracle

prepare()

from fastkernels.core import registry  # noqa: E402 - the host is imported by what follows
from fastkernels.core.spec import Tolerance  # noqa: E402
from fastkernels.overrides.recurrence.production import BASELINES  # noqa: E402

HOST = os.environ["CHECKED_HOST"]
OPS = "gated_delta_rule", "kda", "ssd"
WIDER = 4  # times the tolerance: chunks in float16 round products that are larger than the outputs


def looser(spec):
    wider = {name: Tolerance(WIDER * t.atol, WIDER * t.rtol) for name, t in spec.tolerance.items()}
    return dataclasses.replace(spec, tolerance=wider)


@pytest.mark.parametrize("op", [op for op in OPS if any(b.name == HOST for b in BASELINES[op])])
def test_kernels_of_the_host_compute_the_op(op):
    spec, baseline = registry.get(op), next(b for b in BASELINES[op] if b.name == HOST)
    fn, ran = baseline.make(), []
    adapt(HOST)
    for case in (c for c in spec.cases if "odd" in c.tags):
        if case.dtype == "bfloat16":  # the interpreter truncates it
            case = dataclasses.replace(case, dtype="float16")
        args = make_args(spec, case)
        if baseline.supports(*args) is None:
            want = oracle(spec, args)
            kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            assert mismatch(looser(spec), case, call(spec.op, fn, args), want) is None, case.name
            written = {
                i for i, a in enumerate(spec.op.overload._schema.arguments) if a.alias_info is not None
            }
            for i, (before, after) in enumerate(zip(kept, args, strict=True)):
                if isinstance(before, torch.Tensor) and i not in {*written, *baseline.overwrites}:
                    assert torch.equal(before, after), (case.name, i)
            ran.append(case)
    decodes = {bool(c.dims.get("decode")) for c in ran}
    assert decodes == {True, False}
    states = {c.dims.get("state_dtype", "float32") for c in ran}
    assert {"bfloat16", "float32"} <= states
