"""Work on the result of a convolution in one pass: batch norm with stored statistics, an activation, a residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.overrides.conv.spatial import channels_last
from fastkernels.overrides.kit.elementwise import normal_cdf
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import unsupported_vector

TILE = 1024  # elements of a program
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hard_swish": F.hardswish,
    "hard_sigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
}
CODES = {name: code for code, name in enumerate(FUNCTIONS)}  # as `activate` has them


def check_activation(op: str, activation: str) -> None:
    """Raises ValueError for an unknown activation."""
    if activation not in FUNCTIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(FUNCTIONS)}, got {activation!r}")


@triton.jit
def activate(x, CODE: tl.constexpr):
    """An activation of float32 values. NaN propagates, which tl.maximum does not promise."""
    if CODE == 1:
        x = tl.where(x < 0.0, 0.0, x)
    elif CODE == 2:
        x = tl.where(x < 0.0, 0.0, tl.where(x > 6.0, 6.0, x))
    elif CODE == 3:
        x = x / (1.0 + tl.exp(-x))
    elif CODE == 4:
        x = x * normal_cdf(x)
    elif CODE == 5:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif CODE == 6 or CODE == 7:
        cut = tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 6.0, x + 3.0)) * (1.0 / 6.0)
        x = x * cut if CODE == 6 else cut
    elif CODE == 8:
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def normalize(y, at, known, mean_ptr, var_ptr, w_ptr, b_ptr, eps, HAS_W: tl.constexpr, HAS_B: tl.constexpr):
    """Batch norm of float32 values y of the channels `at`, which broadcast to y's shape."""
    scale = tl.rsqrt(tl.load(var_ptr + at, mask=known, other=1.0).to(tl.float32) + eps)
    if HAS_W:
        scale *= tl.load(w_ptr + at, mask=known, other=0.0).to(tl.float32)
    y = (y - tl.load(mean_ptr + at, mask=known, other=0.0).to(tl.float32)) * scale
    if HAS_B:
        y += tl.load(b_ptr + at, mask=known, other=0.0).to(tl.float32)
    return y


@triton.jit
def _epilogue_kernel(
    x_ptr, mean_ptr, var_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, n, C, inner, eps, HAS_NORM: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CODE: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A channel's neighbors in memory are `inner` elements away: a plane's size, or 1 with channels last.
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    y = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    if HAS_NORM:
        y = normalize(y, (at // inner) % C, known, mean_ptr, var_ptr, w_ptr, b_ptr, eps, HAS_W, HAS_B)
    y = activate(y, CODE)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=known)


@dataclass(frozen=True)
class Norm:
    """Statistics and affine parameters of a batch norm, each [C] or None; without a mean there is no norm."""

    mean: torch.Tensor | None
    var: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    @property
    def vectors(self) -> tuple[torch.Tensor | None, ...]:
        return self.mean, self.var, self.weight, self.bias

    def check(self, op: str, channels: int) -> None:
        """Raises ValueError for vectors that are not [channels], and for a mean without variance."""
        if (self.mean is None) != (self.var is None):
            raise ValueError(f"{op}: mean and var must both be given, or neither")
        for t in self.vectors:
            if t is not None and t.shape != (channels,):
                raise ValueError(f"{op}: the norm's vectors must be [{channels}], got {tuple(t.shape)}")

    def unsupported(self) -> str | None:
        """The reason why kernels cannot read the vectors, or None."""
        named = zip(("mean", "var", "norm weight", "norm bias"), self.vectors, strict=True)
        return next((why for name, t in named if (why := unsupported_vector(t, name))), None)

    def constants(self) -> dict[str, bool]:
        return {"HAS_W": self.weight is not None, "HAS_B": self.bias is not None}

    def by_torch(self, y: torch.Tensor) -> torch.Tensor:
        """The norm of y as PyTorch computes it, which takes vectors of one dtype only."""
        if self.mean is None:
            return y
        wide = torch.promote_types(y.dtype, torch.float32)
        mean, var, weight, bias = (None if t is None else t.to(wide) for t in self.vectors)
        return F.batch_norm(y, mean, var, weight, bias, eps=self.eps)

    def of(self, y: torch.Tensor) -> torch.Tensor:
        """The norm of y [B, C, ...], in y's dtype."""
        if self.mean is None or self.var is None:
            return y
        shape = (-1, *[1] * (y.dim() - 2))
        mean, var = (t.to(y.dtype).view(shape) for t in (self.mean, self.var))
        y = (y - mean) * torch.rsqrt(var + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype).view(shape)
        return y if self.bias is None else y + self.bias.to(y.dtype).view(shape)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x without gaps in memory, in its format: channels last, or contiguous."""
    return x if channels_last(x) else x.contiguous()


def apply_epilogue(
    x: torch.Tensor, norm: Norm, activation: str, residual: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Write activation(norm(x)) + residual to out, which may be x. Both have the format that `dense` gives x."""
    last = channels_last(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last) if last else residual.contiguous()
    if out.numel():
        launch_kernel(
            _epilogue_kernel, (cdiv(x.numel(), TILE),),
            x, *norm.vectors, residual, out, x.numel(), x.shape[1],
            1 if last else x.numel() // (x.shape[0] * x.shape[1]), norm.eps,
            HAS_NORM=norm.mean is not None, **norm.constants(), HAS_RESIDUAL=residual is not None,
            CODE=CODES[activation], TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out
