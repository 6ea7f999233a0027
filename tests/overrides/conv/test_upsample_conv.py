"""upsample_conv beyond its cases: memory formats, weights that change, and diffusers' Upsample2D."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.kernels import warm

import fastkernels
from fastkernels.overrides.conv.diffusers import DiffusersUpsample2D
from fastkernels.overrides.conv.upsample_conv import upsample_conv
from fastkernels.patch import PatchError

Upsample2D = pytest.importorskip("diffusers.models.upsampling").Upsample2D
FORMATS = """
import itertools, torch
import torch.nn.functional as F
from fastkernels.overrides.conv.upsample_conv import upsample_conv

for x_format, w_format in itertools.product((torch.contiguous_format, torch.channels_last), repeat=2):
    x = torch.randn(2, 5, 3, 70).to(memory_format=x_format)
    weight, bias = torch.randn(70, 5, 3, 3).to(memory_format=w_format), torch.randn(70)
    for _ in range(2):
        want = F.conv2d(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1)
        got = upsample_conv(x, weight, bias)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert got.stride() == want.stride(), (got.stride(), want.stride())
        weight.mul_(2)  # as an adapter that is merged into it
    strided = torch.empty(2, 5, 70, 3).transpose(2, 3).copy_(x)
    torch.testing.assert_close(upsample_conv(strided, weight / 2, bias), want, rtol=1e-4, atol=1e-4)
assert upsample_conv(x[:0], weight, bias).shape == (0, 70, 6, 140)
assert upsample_conv.order("cpu")[0][1] is None and not upsample_conv.fallbacks
"""


@pytest.mark.slow
def test_triton_kernels_keep_the_memory_format_of_pytorch() -> None:
    done = warm.run(["-c", FORMATS], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(2, 4, 3, 3)
    with pytest.raises(ValueError, match=r"got x \(2, 4, 3, 3\), weight \(5, 4, 1, 1\)"):
        upsample_conv(x, torch.ones(5, 4, 1, 1))
    with pytest.raises(ValueError, match=r"bias \(4,\) is not for weight"):
        upsample_conv(x, torch.ones(5, 4, 3, 3), torch.ones(4))


@pytest.mark.parametrize(
    "options", [{}, {"name": "op", "bias": False}, {"out_channels": 5, "padding": (1, 1)}]
)
def test_layer_equals_the_hosts(options: dict[str, Any]) -> None:
    theirs, ours = (cls(6, use_conv=True, **options) for cls in (Upsample2D, DiffusersUpsample2D))
    assert DiffusersUpsample2D.supports(theirs) is None
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 5, 3)
    upsample_conv.reset()
    with torch.no_grad():
        for size in (None, (10, 6), torch.Size((9, 7))):
            torch.testing.assert_close(ours(x, size), theirs(x, size))
    assert upsample_conv.calls == 2
    assert upsample_conv.fallbacks == {"output_size (9, 7) is not twice (5, 3)": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"use_conv_transpose": True}, {"use_conv": False}, {"interpolate": False}, {"kernel_size": 1, "padding": 0},
        {"norm_type": "rms_norm", "eps": 1e-6, "elementwise_affine": True},
    ],
)  # fmt: skip
def test_other_layers_stay_with_the_host(options: dict[str, Any]) -> None:
    model = torch.nn.Sequential(Upsample2D(6, **{"use_conv": True, **options}))
    reason = (
        "its convolution has kernel size" if "kernel_size" in options else "it has a norm or a transposed"
    )
    with pytest.raises(PatchError, match=f"1 unsupported: {reason}"):
        fastkernels.patch(model, ops="upsample_conv")


def test_changed_convolution_runs_its_own_code() -> None:
    model = torch.nn.Sequential(Upsample2D(6, use_conv=True))
    x = torch.randn(1, 6, 3, 4)
    with torch.no_grad(), fastkernels.patch(model, ops="upsample_conv") as report:
        hook = model[0].conv.register_forward_hook(lambda module, args, y: y + 1)
        hooked = model(x)
        hook.remove()
        torch.testing.assert_close(hooked, model(x) + 1)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
        (row,) = report.refresh().active
    assert row.calls == 1
    assert row.fallbacks == {
        "its convolution's forward was replaced by other code": 1,
        "autocast chooses the convolution's dtype": 1,
    }
