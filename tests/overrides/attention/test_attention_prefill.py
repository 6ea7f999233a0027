"""Prefill attention: padding rows, and blocks of queries of many sequences."""

from __future__ import annotations

import os

import pytest
import torch
from support.kernels import warm

from fastkernels.core import registry

CODE = """
import torch
from fastkernels.overrides.attention import attention_prefill as prefill
starts, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 5], [7, 0, 0]))
q, cache = torch.randn(9, 2, 8), torch.randn(2, 4, 4, 1, 8)
table = torch.tensor([[1, 3], [0, 0], [0, 0]], dtype=torch.int32)
args = (q, *cache, starts, lens, table, 3, 7, 8**-0.5, -1, 0.0, 1.0, 1.0)
want = prefill.reference(*args)
for padded in (True, False):
    out = torch.full_like(q, 7.0)
    assert prefill._triton(*args, padded, out=out) is out
    assert torch.allclose(out[:5], want[:5], atol=1e-5) and not out[3:5].any()  # queries without keys too
    assert bool((out[5:] == (0.0 if padded else 7.0)).all())
"""
MANY = """
import itertools
import torch
from fastkernels.overrides.attention import attention_prefill as prefill
generator = torch.Generator().manual_seed(0)
cases = [*itertools.product(((16, 2), (6, 2), (1, 1)), (-1, 5), (0, 2), (16,)), ((4, 2), 5, 2, 320)]
for (heads, kv_heads), window, first, size in cases:
    n, keys = torch.tensor([1, 1, 19, 0, 37, 1, 0, 0]), torch.tensor([9, 33, 19, 0, 50, 1, 0, 0]).int()
    starts = torch.cat((torch.zeros(1), n.cumsum(0))).int()
    q = torch.randn(int(starts[-1]) + 3, heads, size, generator=generator)
    cache = torch.randn(2, 8 * 10, 5, kv_heads, size, generator=generator)
    table = torch.randperm(80, generator=generator).view(8, 10).int()
    sinks = torch.randn(heads, generator=generator)
    rest = 37, 50, size**-0.5, window, 0.0, 1.0, 1.0, True, sinks
    args = (q, *cache, starts[first:], keys[first:], table[first:], *rest)
    want, out = prefill.reference(*args), prefill._triton(*args)
    rows = slice(int(starts[first]), None)  # earlier ones are undefined
    torch.testing.assert_close(out[rows], want[rows], atol=1e-5, rtol=1e-5)
"""


@pytest.mark.parametrize("code", [CODE, MANY], ids=["padding", "many sequences"])
def test_triton_prefill_matches_reference(code: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", code], env)
    assert done.returncode == 0, done.stderr


def test_padded_argument_follows_the_case() -> None:
    for name in ("attention_prefill", "attention"):
        spec = registry.get(name)
        assert any("padding" in c.dims for c in spec.cases)
        for case in spec.cases:
            if max(case.dims["seq_lens"]) < 1000:
                args = spec.inputs(case, "cpu", torch.Generator().manual_seed(0))
                padded = args[13] if name == "attention_prefill" else args[-1]
                assert padded is ("padding" in case.dims), case.name
