"""window_attention beyond its cases: refused arguments, views of one product, programs of several images."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.kernels import warm

from fastkernels.overrides.dense_attention.window_attention import window_attention

Q, SCALE, BIAS = torch.randn(6, 5, 2, 8), torch.zeros(2), torch.zeros(2, 5, 5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Q[0], Q[0], Q[0], SCALE, BIAS), r"q, k and v must be \[B, N, H, D\], all alike"),
        ((Q, Q[:3], Q[:3], SCALE, BIAS), r"got q \(6, 5, 2, 8\), k \(3, 5, 2, 8\)"),
        ((Q, Q, Q, SCALE.view(2, 1, 1), BIAS), r"logit_scale \(2, 1, 1\) and bias \(2, 5, 5\) are not \[H\]"),
        ((Q, Q, Q, SCALE, BIAS[:1]), r"bias \(1, 5, 5\) are not \[H\] and \[H, N, N\]"),
        ((Q, Q, Q, SCALE, BIAS, torch.zeros(4, 5, 5)), r"mask \(4, 5, 5\) is not \[W, N, N\]"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_attention(*args)


KERNEL = """
import torch
from fastkernels.overrides.dense_attention import window_attention as wa

torch.manual_seed(0)
shapes = []
launch = wa.launch_kernel
wa.launch_kernel = lambda kernel, grid, *args, **more: shapes.append((grid, more["EACH"])) or launch(
    kernel, grid, *args, **more
)
wa.multiprocessors = lambda device: 1
for images, windows, tokens, heads, masked in ((9, 2, 12, 2, True), (29, 1, 9, 3, False), (2, 1, 130, 1, True)):
    q, k, v = torch.randn(images * windows, tokens, 3, heads, 24).unbind(2)  # views of one product
    logit_scale, bias = torch.tensor([0.0, 7.0, -2.0][:heads]), torch.randn(tokens, tokens, heads).permute(2, 0, 1)
    mask = -100.0 * (torch.rand(windows, tokens, tokens) < 0.3) if masked else None
    q[0, 0] = 0.0  # has no direction
    got = wa._triton(q, k, v, logit_scale, bias, mask)
    torch.testing.assert_close(got, wa.reference(q, k, v, logit_scale, bias, mask), rtol=1e-4, atol=1e-4)
    assert got.is_contiguous()
assert shapes == [((2 * 2 * 3,), 4), ((3 * 4,), 8), ((3 * 2,), 1)], shapes
"""


def test_programs_take_several_images_and_parts_of_windows() -> None:
    done = warm.run(["-c", KERNEL], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
