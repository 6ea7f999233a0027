"""Interpreted elementwise kernels on large tensors, which use larger tiles, and on every 16-bit number."""

from __future__ import annotations

import os

from support.kernels import warm

LARGE = """
import torch
from fastkernels.overrides.activation import gelu, relu2
from fastkernels.overrides.kit import elementwise
elementwise.LARGE = 1
for shape, strided in (((3, 5000), False), ((2, 4096), True), ((1, 4097), False)):
    x = torch.randn(shape[0], 2 * shape[1])[:, : shape[1]] if strided else torch.randn(shape)
    assert torch.allclose(gelu._triton(x), torch.nn.functional.gelu(x), atol=1e-5)
    assert torch.equal(relu2._triton(x), torch.relu(x).square())
"""


CDF = """
import torch
from fastkernels.overrides.activation import gelu, gelu_and_mul
x = torch.arange(-32768, 32768).to(torch.int16).view(torch.float16)  # every number, with infinities and NaN
exact = x.double() * torch.special.ndtr(x.double())
got, own = gelu._triton(x), exact.half()
assert torch.equal(got.isnan(), own.isnan()) and torch.equal(got.isinf(), own.isinf())
known = own.isfinite()
apart = (got.double() - exact).abs()[known]
limit = (own.double() - exact).abs()[known] + 4e-7 + 2e-5 * exact.abs()[known]
assert bool((apart <= limit).all()), (apart - limit).max()
assert (got != own)[known].float().mean() < 0.05  # nearly always the correctly rounded result
pair = torch.cat([x, torch.ones_like(x)])
assert torch.equal(gelu_and_mul._triton(pair)[known], got[known])
"""


def interpret(code: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", code], env)
    assert done.returncode == 0, done.stderr


def test_large_tiles_cover_every_element() -> None:
    interpret(LARGE)


def test_exact_gelu_of_every_16_bit_number() -> None:
    interpret(CDF)
