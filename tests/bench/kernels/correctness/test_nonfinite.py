"""NaN and infinity: what references give, what the judge accepts, and what kernels in Triton's interpreter do."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.correctness import extremes
from fk_bench.kernels.judge.correctness.errors import compare, expect, row_of
from fk_bench.kernels.judge.memory import layout
from support.kernels import warm

from fastkernels.core import registry
from fastkernels.core.spec import Case, OpSpec
from fastkernels.overrides.kit.softmax import weights_of

CONTAINED = [name for name in registry.op_names() if registry.get(name).contained is not None]
MOST = 1 << 18  # bytes of a case


def small(spec: OpSpec, number: int = 2) -> list[Case]:
    return [c for c in spec.cases if "model" not in c.tags and spec.bytes_moved(c) < MOST][:number]


def arguments(spec: OpSpec, case: Case, kind: str) -> list[Any]:
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(1))
    edit = next(k.edit for k in extremes.kinds(spec) if k.name == kind)
    assert edit is not None
    edit(args)
    return args


def problems(name: str, kind: str) -> list[str]:
    """The judge's objections to the results of each provider that runs here."""
    spec, found = registry.get(name), []
    for case in small(spec):
        args = arguments(spec, case, kind)
        want = expect(spec, case, layout.mapped(args, torch.clone), "op")
        assert any(not t.isfinite().all() for t in want.outputs), (
            f"{name} {case.name}: nothing reads the {kind}"
        )
        for provider in spec.op.providers:
            given = layout.mapped(args, torch.clone)
            if provider.unavailable("cpu") or (provider.supports is not None and provider.supports(*given)):
                continue
            got = [*layout.tensors(provider.fn(*given)), *(given[i] for i in want.written)]
            if problem := compare(spec, case, got, want, nonfinite=True).problem:
                found.append(f"{name} {case.name} {provider.name}: {problem}")
    return found


def test_attention_ops_contain_nan() -> None:
    assert {"attention", "attention_decode", "attention_prefill", "attention_dense", "window_attention"} <= {
        *CONTAINED
    }
    assert {"mla_decode", "mla_prefill", "mla_expanded", "mla_sparse"} <= {*CONTAINED}


@pytest.mark.parametrize("name", [n for n in CONTAINED if registry.get(n).op is not None])
def test_bad_query_changes_no_other_result(name: str) -> None:
    assert problems(name, "nan") == []


def lost_in_fp8() -> list[str]:
    """Providers of quantize_fp8 that lose a NaN, or that a NaN or infinity gives another scale."""
    found = []
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    x[1, 7], x[2, 5] = float("nan"), float("inf")
    spec = registry.get("quantize_fp8")
    for group in (-1, 0, 128):
        given = (x, None, group, None, 1 / 512, False, False, False)
        values, scales = spec.reference(*given)
        assert values[1, 7].isnan() and not scales.isnan().any()
        for provider in spec.op.providers:
            if not provider.unavailable("cpu"):
                got, found_scales = provider.fn(*given)
                if not (torch.equal(got.isnan(), values.isnan()) and torch.equal(found_scales, scales)):
                    found.append(f"{provider.name} with groups of {group}")
    return found


def test_quantization_keeps_nan_and_its_scale() -> None:
    assert lost_in_fp8() == []


def test_interpreted_kernels_contain_nan() -> None:
    names = [n for n in CONTAINED if registry.get(n).op is not None]
    code = (
        f"import sys\nsys.path[:0] = [{os.getcwd()!r}, {os.getcwd() + '/tests'!r}]\n"
        "from tests.bench.kernels.correctness.test_nonfinite import lost_in_fp8, problems\n"
        f"found = [p for n in {names} for p in problems(n, 'nan')]\n"
        "raise SystemExit('\\n'.join(found + lost_in_fp8()) or 0)"
    )
    done = warm.run(["-c", code], {**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]


def test_masked_rows_give_zeros_and_nan_stays() -> None:
    minus, nan, inf = float("-inf"), float("nan"), float("inf")
    scores = torch.tensor([[minus, minus], [1.0, minus], [nan, minus], [inf, 0.0], [2.0, 2.0]])
    found = weights_of(scores)
    assert torch.equal(found[:2], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    assert found[2:4].isnan().all() and torch.equal(found[4], torch.tensor([0.5, 0.5]))


def test_unspecified_values_are_accepted_others_compared() -> None:
    spec = registry.get("attention_dense")
    case = small(spec)[1]
    args = arguments(spec, case, "nan")
    want = expect(spec, case, args, "op")
    lost = ~want.outputs[0].isfinite()
    assert 0 < int(lost.sum()) < lost.numel()
    got = want.native[0].clone()
    for value in (0.0, 7.0, float("nan"), float("inf")):
        got[lost] = value
        assert compare(spec, case, [got], want, nonfinite=True).problem == ""
    got[tuple((~lost).nonzero()[0].tolist())] += 1.0
    assert "1 of" in compare(spec, case, [got], want, nonfinite=True).problem


def test_attention_module_reads_rows_of_each_call() -> None:
    """Rows that are apart have to be copied for a host's module: in each call, not when it is built."""
    spec = registry.get("attention")
    case = next(c for c in spec.cases if c.name == "decode_odd")
    args = arguments(spec, case, "rows_apart")
    assert not args[2].is_contiguous()
    target = next(t for t in spec.targets if t.host == "vllm")
    call = spec.build(registry.target_class(target), args)
    call()
    args[2].mul_(-1.5)
    want = spec.reference(*layout.mapped(args, torch.clone))[0]
    torch.testing.assert_close(call()[0], want)


def test_four_dimensions_are_refused_by_name() -> None:
    spec = registry.get("mamba_scan")
    args = spec.inputs(small(spec)[0], "cpu", torch.Generator().manual_seed(1))
    args[0] = args[0][None]
    with pytest.raises(ValueError, match=r"mamba_scan: x \(1, .*\) and a .* must be \[T, D\] and \[D, N\]"):
        spec.op(*args)


def test_row_of_an_image_is_its_channels() -> None:
    """An equal image gives equal columns: channels whose sum is small have the errors of the others."""
    spec = registry.get("upsample_conv")
    assert row_of(spec, 0, 4) == -3 and row_of(registry.get("rms_norm"), 0, 2) == -1
    case = Case(
        "equal",
        {"batch": 1, "channels": 64, "rows": 20, "columns": 20, "outer": 48, "affine": False},
        "bfloat16",
    )
    args = spec.inputs(case, "cpu", torch.Generator().manual_seed(1))
    args[0].fill_(0.75)
    args[1][5] -= args[1][5].mean()  # a channel whose products sum up to little
    want = expect(spec, case, args, "op")
    honest = compare(spec, case, [want.native[0]], want)
    got = want.native[0].clone()
    got[:, 5] += 0.02 * want.outputs[0].abs().max().to(got.dtype)
    assert "wrong" in compare(spec, case, [got], want, allowed=honest.rms, baseline=honest).problem
    got = want.native[0].clone()
    got[:, 5] += 0.002 * want.outputs[0].abs().max().to(got.dtype)
    assert compare(spec, case, [got], want, allowed=honest.rms, baseline=honest).problem == ""
