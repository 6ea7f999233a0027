"""Ops of CNNs beyond their cases: memory formats, dtypes, Hopper's compiler, errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import ahead, warm
from torch._prims_common import suggest_memory_format

from fastkernels.core import registry
from fastkernels.overrides.conv.batch_norm import batch_norm
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act, reference
from fastkernels.overrides.conv.global_response_norm import global_response_norm
from fastkernels.overrides.conv.spatial import channels_last
from fastkernels.overrides.conv.squeeze_excite import squeeze_excite
from fastkernels.overrides.kit import overlap

# One of the convolutions is depthwise, one pointwise, one neither; all formats of image, weight and residual.
FORMATS = """
import itertools, torch
from fastkernels.overrides.conv.batch_norm import batch_norm
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act, reference
from fastkernels.overrides.conv.squeeze_excite import squeeze_excite
from fastkernels.overrides.conv.squeeze_excite import reference as excited

forms = torch.contiguous_format, torch.channels_last
for kernel, groups in ((3, 5), (1, 1), (3, 1)):
    for x_format, w_format in itertools.product(forms, repeat=2):
        x = torch.randn(1, 5, 3, 4).to(memory_format=x_format)
        weight = torch.randn(5, 5 // groups, kernel, kernel).to(memory_format=w_format)
        residual = torch.randn(1, 5, 3, 4).to(memory_format=x_format)
        norm = torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), None
        rest = (residual, (1,), (kernel // 2,), (1,), groups, "relu")
        got = conv_norm_act(x, weight, None, *norm, *rest)
        torch.testing.assert_close(got, reference(x, weight, None, *norm, *rest), rtol=1e-4, atol=1e-4)
        last = x_format is torch.channels_last or (w_format is torch.channels_last and kernel > groups)
        assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
# The product of cuBLAS or the convolution of cuDNN, and a kernel for what is left
library = next(p.fn for p in conv_norm_act.providers if p.name == "library")
for (kernel, groups), x_format in itertools.product(((3, 5), (1, 1), (3, 1)), forms):
    x = torch.randn(2, 5, 3, 4).to(memory_format=x_format)
    weight = torch.randn(5, 5 // groups, kernel, kernel).to(memory_format=x_format)
    image = torch.randn(2, 5, 3, 4).to(memory_format=x_format)
    for bias, norm, residual, activation, add_first in itertools.product(
        (None, torch.randn(5)), (False, True), (None, image), ("none", "relu", "silu"), (False, True)
    ):
        vectors = (torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), None) if norm else (None,) * 4
        given = x, weight, bias, *vectors, residual, (1,), (kernel // 2,), (1,), groups, activation, 1e-5, add_first
        got, kept = library(*given), image.clone()
        torch.testing.assert_close(got, reference(*given), rtol=1e-4, atol=1e-4)
        assert got.stride() == x.stride() and torch.equal(image, kept)
for form in forms:
    x = torch.randn(1, 5, 3, 4).to(memory_format=form)
    norm = torch.randn(5), torch.rand(5) + 0.5
    got = batch_norm(x, *norm, None, None, 1e-5, "silu")
    want = torch.nn.functional.silu(torch.nn.functional.batch_norm(x, *norm))
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    weights = torch.randn(3, 5), torch.randn(5, 3)
    got = squeeze_excite(x, *weights)
    torch.testing.assert_close(got, excited(x, *weights))
    assert got.stride() == x.stride()
    part = torch.randn(2, 9, 3, 4).to(memory_format=form)[:, 2:7]  # of the channels of images
    assert squeeze_excite(part, *weights).is_contiguous(memory_format=form)
    for op, (kernel, groups) in itertools.product((conv_norm_act, library), ((3, 5), (1, 1), (3, 1))):
        given = part, torch.randn(5, 5 // groups, kernel, kernel), *[None] * 6, (1,), (kernel // 2,), (1,), groups
        got = op(*given)
        torch.testing.assert_close(got, reference(*given), rtol=1e-4, atol=1e-4)
        assert got.is_contiguous(memory_format=form)
x = torch.randn(1, 5, 3, 4)
assert conv_norm_act(x[:0], torch.randn(5, 1, 3, 3), *[None] * 6, (1,), (0,), (1,), 5).shape == (0, 5, 1, 2)
nan = conv_norm_act(x * torch.nan, torch.ones(5, 5, 1, 1), *[None] * 6, (1,), (0,), (1,), 1, "relu")
assert nan.isnan().all()
for op in (conv_norm_act, batch_norm, squeeze_excite):
    assert op.order("cpu")[0][1] is None and not op.fallbacks, op
"""


@pytest.mark.parametrize("shape", list(itertools.product((1, 3), (1, 2, 8), (1, 5), (1, 4))), ids=str)
def test_parts_of_images_have_the_format_that_pytorch_sees(shape: tuple[int, ...]) -> None:
    for form in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(*shape).to(memory_format=form)
        for part in (
            images, images[:, : -(-shape[1] // 2)], images[:, shape[1] // 2 :], images[:, ::2], images[:1],
            images[:, :, :1], images[..., :1], images[:, :, ::2, ::2], images.mT, images[:1].expand(3, -1, -1, -1),
            images[:0],
        ):  # fmt: skip
            seen = suggest_memory_format(part) is torch.channels_last and not part.is_contiguous()
            assert channels_last(part) == seen, (part.shape, part.stride())


def test_triton_kernels_keep_the_memory_format_of_pytorch() -> None:
    done = warm.run(["-c", FORMATS], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


RESPONSES = """
import torch
from fastkernels.overrides.conv import global_response_norm as norm
for sums in (norm.SUMS, 64):  # all channels at once, or 16 for at most four parts
    norm.SUMS = sums
    for shape in ((1, 70, 40), (2, 300, 50), (3, 1, 65)):
        x, w, b = torch.randn(shape), torch.randn(shape[2]), torch.randn(shape[2])
        for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            want = norm.reference(given.double(), w.double(), b.double()).float()
            torch.testing.assert_close(norm._triton(given, w, b), want, atol=2e-5, rtol=2e-5)
"""


def test_global_response_norm_in_parts_and_layouts() -> None:
    done = warm.run(["-c", RESPONSES], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.tuples(*[st.integers(1, 3)] * 2),
    st.tuples(*[st.integers(0, 2)] * 2), st.tuples(*[st.integers(1, 2)] * 2), st.sampled_from([1, 2, 4]),
    st.booleans(),
)  # fmt: skip
def test_every_setting_equals_float64(
    rows: int,
    columns: int,
    high: int,
    wide: int,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    norm: bool,
) -> None:
    sizes = [
        n + 2 * p - d * (k - 1)
        for n, p, d, k in zip((rows, columns), padding, dilation, (high, wide), strict=True)
    ]
    x, weight = torch.randn(2, 4, rows, columns), torch.randn(8, 4 // groups, high, wide)
    vectors = [torch.randn(8), torch.rand(8) + 0.5, torch.randn(8), torch.randn(8)] if norm else [None] * 4
    args = (x, weight, torch.randn(8), *vectors, None, stride, padding, dilation, groups, "silu")
    if min(sizes) < 1:
        with pytest.raises(ValueError, match="is smaller than the window"):
            conv_norm_act(*args)
        return
    double = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    torch.testing.assert_close(conv_norm_act(*args).double(), reference(*double), rtol=1e-4, atol=1e-4)


ONES, ONCE = torch.ones(4, 4, 1, 1), ((1,), (0,), (1,), 1)  # stride, padding, dilation, groups


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


IMAGE = bf16(2, 32, 8, 16).to(memory_format=torch.channels_last)
VECTORS = tuple(torch.empty(32) for _ in range(4))
CALLS: dict[str, tuple[str, tuple[Any, ...], set[str]]] = {
    "depthwise": ("conv_norm_act", (IMAGE, bf16(32, 1, 7, 7), None, *VECTORS, IMAGE, (1,), (3,), (1,), 32, "gelu"),
                  {"_depthwise_kernel"}),
    "pointwise": ("conv_norm_act", (IMAGE, bf16(32, 32, 1, 1), None, *VECTORS, IMAGE, (1,), (0,), (1,), 1, "relu"),
                  {"_dense_kernel"}),
    "float32": ("conv_norm_act", (IMAGE.float(), bf16(32, 32, 1, 1).float(), None, *VECTORS), {"_dense_kernel"}),
    "others": ("conv_norm_act", (IMAGE, bf16(32, 32, 3, 3), None, *VECTORS, IMAGE, (1,), (1,), (1,), 1, "hard_swish"),
               {"_epilogue_kernel"}),
    "norm": ("batch_norm", (IMAGE, *VECTORS, 1e-5, "silu"), {"_epilogue_kernel"}),
    "gates": ("squeeze_excite", (IMAGE, bf16(8, 32), bf16(32, 8), bf16(8), bf16(32), "silu", "hard_sigmoid"),
              {"_channel_sums_kernel", "_squeeze_kernel", "_excite_kernel"}),
    "response": ("global_response_norm", (bf16(2, 300, 64), bf16(64), bf16(64)),
                 {"_channel_sums_kernel", "_response_kernel", "_respond_kernel"}),
}  # fmt: skip


FAST = ("pointwise", "norm")


@pytest.mark.parametrize(
    "call", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in CALLS]
)
def test_kernels_compile_for_hopper(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_quick", False)  # each launch is Triton's own
    name, args, kernels = CALLS[call]
    provider = next(p for p in registry.get(name).op.providers if p.name == "triton")
    found = ahead.launched(lambda: provider.fn(*args))
    assert {launch[0].fn.__name__ for launch in found} == kernels
    for launch in found:
        ahead.compile_for(launch, 90)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: conv_norm_act(x[0], ONES), r"x must be \[B, C, H, W\], got \(4, 3, 3\)"),
        (lambda x: conv_norm_act(x, torch.ones(4, 3, 1, 1)), r"weight \(4, 3, 1, 1\) with 1 groups is not for x"),
        (lambda x: conv_norm_act(x, ONES, *[None] * 6, *ONCE, "mish"), "must be one of none, relu, .* 'mish'"),
        (lambda x: conv_norm_act(x, ONES, torch.ones(3)), r"bias must be \[4\], got \(3,\)"),
        (lambda x: conv_norm_act(x, ONES, None, torch.ones(4)), "mean and var must both be given"),
        (lambda x: conv_norm_act(x, ONES, *[None] * 5, x[:1]), r"residual \(1, 4, 3, 3\) is not \(2, 4"),
        (lambda x: batch_norm(x, torch.ones(3), torch.ones(4)), r"vectors must be \[4\], got \(3,\)"),
        (lambda x: squeeze_excite(x, torch.ones(2, 3), torch.ones(4, 2)), r"reduce_weight \(2, 3\) \[R, C\]"),
        (lambda x: squeeze_excite(x, torch.ones(2, 4), torch.ones(2, 4)), r"expand_weight must be \(4, 2\)"),
        (lambda x: squeeze_excite(x, torch.ones(2, 4), torch.ones(4, 2), None, None, "relu", "x"), "got 'x'"),
        (lambda x: global_response_norm(x, torch.ones(4), torch.ones(4)), r"must be \[B, T, C\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4, 3, 3))


def test_statistics_may_be_wider_than_the_image() -> None:
    """As in our models: statistics in float32, the rest in bfloat16."""
    x, weight = torch.randn(2, 6, 4, 5).bfloat16(), torch.randn(6, 6, 1, 1).bfloat16()
    mean, var, scale = torch.randn(6), torch.rand(6) + 0.5, torch.randn(6).bfloat16()
    args = (x, weight, None, mean, var, scale, scale, None, *ONCE, "relu")
    got, want = conv_norm_act(*args), reference(*args)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        batch_norm(x, mean, var, scale),
        registry.get("batch_norm").reference(x, mean, var, scale),
        rtol=2e-2,
        atol=2e-2,
    )


def test_hook_on_an_activation_is_the_reason() -> None:
    """Modules of ultralytics share one activation: a hook on it is no other activation."""
    layer = registry.op_class("conv_norm_act", "UltralyticsConv")(3, 4)
    layer.act = torch.nn.SiLU()
    assert layer.supports(layer) is None
    layer.act.register_forward_hook(lambda *given: None)
    assert layer.supports(layer) == "other code was put around its activation"
    layer.act = torch.nn.Softplus()
    assert layer.supports(layer) == "its activation is Softplus"
