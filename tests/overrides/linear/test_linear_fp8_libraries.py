"""FP8 products of other libraries: supported calls, and the arguments that the libraries get."""

from __future__ import annotations

import pytest
import torch
from support.kernels.linear_fp8 import args, randn

from fastkernels.overrides.linear import linear_fp8_libraries as libraries
from fastkernels.overrides.linear.kernels import linear_fp8_scales as scales
from fastkernels.overrides.linear.linear_fp8 import linear_fp8, reference


def test_unsupported_calls_have_a_reason() -> None:
    x, weight, xs, ws = args()
    blocks = args(n=256, k=384, kind=scales.BLOCK)
    for supports, call, said in (
        (libraries.supports_cutlass, (x, weight, xs, ws), None),
        (libraries.supports_cutlass, blocks, None),
        (libraries.supports_cutlass, (*blocks, torch.zeros(256, dtype=torch.bfloat16)), "adds no bias"),
        (
            libraries.supports_cutlass,
            args(n=208, k=384, kind=scales.BLOCK),
            "N = 208 and K = 384 must be multiples of 128",
        ),
        (libraries.supports_cutlass, args(n=50), "N = 50 and K = 144 must be multiples of 16"),
        (libraries.supports_cutlass, (x.float(), weight, xs, ws), "x is torch.float32"),
        (libraries.supports_cutlass, (x, weight, xs.double(), ws), "scales are torch.float64"),
        (libraries.supports_cutlass, (x, weight, xs, ws, torch.zeros(48)), "bias is torch.float32"),
        (libraries.supports_cutlass, (x, weight, xs, ws, None, torch.float32), "out_dtype torch.float32"),
        (libraries.supports_sgl, (x, weight, xs, ws), None),
        (libraries.supports_sgl, (x[:1], weight, xs[:1], ws, torch.zeros(48, dtype=torch.bfloat16)), None),
        (libraries.supports_sgl, (x, weight, xs[:1], ws), "needs one scale for each token"),
        (libraries.supports_sgl, (x, weight, xs, ws[:1]), "one for each row of the weight"),
        (libraries.supports_sgl, blocks, "needs one scale for each token"),
        (libraries.supports_sgl, args(k=136), "K = 136 must be multiples of 16"),
        (
            libraries.supports_sgl,
            (x, weight, xs, ws.bfloat16()),
            "scales are torch.float32 and torch.bfloat16",
        ),
        (libraries.supports_cublas, args(kind=scales.TENSOR), None),
        (libraries.supports_cublas, (x, weight, xs, ws), None),
        (libraries.supports_cublas, (x, weight, xs, ws[:1]), "both x and the weight must have them"),
        (libraries.supports_cublas, blocks, "left to DeepGEMM"),
        (libraries.supports_deepgemm, (x, weight, xs, ws), "DeepGEMM needs block scales"),
        (libraries.supports_deepgemm, (*blocks, None, torch.float16), "gives bfloat16"),
    ):
        found = supports(*call)
        assert found is None if said is None else said in str(found), found


def test_sgl_kernel_gets_contiguous_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SGLang: x with two dimensions, scales [M, 1] and [N, 1], the weight's columns contiguous."""

    def fp8_scaled_mm(
        a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        assert a.is_contiguous() and b.t().is_contiguous() and sa.is_contiguous() and sb.is_contiguous()
        assert (sa.shape, sb.shape, sa.dtype, sb.dtype) == ((6, 1), (48, 1), torch.float32, torch.float32)
        return ((a.float() @ b.float()) * sa * sb.t() + bias).to(dtype)

    monkeypatch.setattr(libraries, "_sgl_kernel", lambda: fp8_scaled_mm)
    x, weight, xs, ws = args(m=6)
    bias = randn(48).half()
    for scale in (xs, torch.stack([xs, xs], 1)[:, 0]):
        call = x.view(2, 3, 144), weight, scale.view(2, 3, 1), ws, bias, torch.float16
        assert libraries.supports_sgl(*call) is None
        torch.testing.assert_close(libraries.linear_fp8_sgl(*call), reference(*call), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("library", ["vllm", "sgl_kernel"])
def test_suitable_tensors_are_passed_without_views(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view costs 1 us of CPU time: x with two dimensions, scales [M, 1] and [N, 1] and the result need none."""
    got: list[torch.Tensor] = []
    made = torch.zeros(6, 48, dtype=torch.bfloat16)

    def vllms(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> None:
        got[:] = [out, a, *rest[:2]]
        out.copy_((a.float() @ b.float()) * rest[0] * rest[1].t())

    def sgl(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        got[:] = [made, a, *rest[:2]]
        return made.copy_((a.float() @ b.float()) * rest[0] * rest[1].t())

    monkeypatch.setattr(libraries, "_cutlass_scaled_mm", lambda: vllms)
    monkeypatch.setattr(libraries, "_sgl_kernel", lambda: sgl)
    run = libraries.linear_fp8_cutlass if library == "vllm" else libraries.linear_fp8_sgl
    x, weight, xs, ws = args(m=6)
    want = reference(x, weight, xs, ws)
    rows = ws[:, None].contiguous()
    found = run(x, weight, xs, rows)
    torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    assert all(a is b for a, b in zip(got, (found, x, xs, rows), strict=True))
    for tokens, of_x, of_w in ((x.view(2, 3, 144), xs.view(2, 3, 1), ws), (x, xs[:, 0], ws[:, None])):
        found = run(tokens, weight, of_x, of_w)
        assert found.shape == (*tokens.shape[:-1], 48) and [t.shape for t in got[1:]] == [
            x.shape,
            (6, 1),
            (48, 1),
        ]
        torch.testing.assert_close(found.view(6, 48), want, atol=2e-2, rtol=2e-2)


def test_granularity_is_computed_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key, `supports` and the kernel's call share the result for equal shapes."""
    monkeypatch.setattr(libraries, "_cutlass_scaled_mm", lambda: lambda out, *rest: None)
    scales._granularity.cache_clear()
    for _ in range(2):  # layers of one shape
        call = args(m=7)
        assert linear_fp8.key is not None and linear_fp8.key.of(*call)[0][2] == scales.ROW
        assert libraries.supports_cutlass(*call) is None
        libraries.linear_fp8_cutlass(*call)
    assert scales._granularity.cache_info().misses == 1
    for _ in range(2):  # errors are not cached
        with pytest.raises(ValueError, match=r"one per token \(7, 1\), or with"):
            scales.granularity(call[0], call[1], torch.rand(6, 1), call[3])


def test_cutlass_gets_column_major_scales() -> None:
    padded = torch.rand(3, 8).t()[:5]
    for scale in (torch.rand(5, 3), padded, torch.rand(3, 5).t()):
        found = libraries.column_major(scale)
        assert torch.equal(found, scale) and found.stride() == (1, 5)
    assert libraries.column_major(found) is found
