"""Padding rows of prefill attention: zeros, unless the caller declares that there are none."""

from __future__ import annotations

import os

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


def test_output_is_zeroed_only_for_padded_batches() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = warm.run(["-c", CODE], env)
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
