"""linear_gelu: the epilogue of cuBLASLt, and bad input."""

from __future__ import annotations

import pytest
import torch

from fastkernels.overrides.linear import linear_gelu as op


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 2e-3), (torch.bfloat16, 0.016)])
def test_epilogue_of_cublaslt_is_gelu_with_tanh(dtype: torch.dtype, atol: float) -> None:
    x, weight, bias = torch.randn(3, 70, 128), torch.randn(256, 128) / 11, torch.randn(256)
    x, weight, bias = (t.to("cuda", dtype) for t in (x, weight, bias))
    found = op._cublaslt(x, weight, bias, "tanh")
    torch.testing.assert_close(found, op.reference(x, weight, bias, "tanh"), atol=atol, rtol=atol)


def test_epilogue_refuses_what_it_does_not_compute() -> None:
    x, weight, bias = (torch.randn(*sizes).half() for sizes in ((2, 4), (3, 4), (3,)))
    assert op._supports_cublaslt(x, weight, bias, "tanh") is None
    assert "float32" in str(op._supports_cublaslt(*(t.float() for t in (x, weight, bias)), "tanh"))
    assert "erf" in str(op._supports_cublaslt(x, weight, bias, "none"))
    assert "bias" in str(op._supports_cublaslt(x, weight, None, "tanh"))
    assert "dtypes" in str(op._supports_cublaslt(x.bfloat16(), weight, bias, "tanh"))


@pytest.mark.parametrize(
    ("weight", "bias", "approximate", "message"),
    [
        ((3, 5), (3,), "tanh", "is not .N, 4."), ((3, 4), (4,), "tanh", "is not .N. of"),
        ((3, 4), (3,), "exact", "'exact'"),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    weight: tuple[int, ...], bias: tuple[int, ...], approximate: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        op.linear_gelu(torch.randn(2, 4), torch.randn(weight), torch.randn(bias), approximate)
