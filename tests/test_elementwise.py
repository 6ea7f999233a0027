"""Element-wise kernels on large tensors, of which a program has a larger tile: interpreted, with the limit lowered."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
from fastkernels.overrides.l1 import _elementwise, gelu, relu2
_elementwise.LARGE = 1
for shape, strided in (((3, 5000), False), ((2, 4096), True), ((1, 4097), False)):
    x = torch.randn(shape[0], 2 * shape[1])[:, : shape[1]] if strided else torch.randn(shape)
    assert torch.allclose(gelu._triton(x), torch.nn.functional.gelu(x), atol=1e-5)
    assert torch.equal(relu2._triton(x), torch.relu(x).square())
"""


def test_large_tiles_leave_nothing_out() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
