"""Work on the result of a convolution in one pass: batch norm with stored statistics, an activation, a residual."""

from __future__ import annotations

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
ACTIVATIONS = (  # in the order of the codes of `activate`
    "none", "relu", "relu6", "silu", "gelu", "gelu_tanh", "hard_swish", "hard_sigmoid", "sigmoid",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(ACTIVATIONS)}


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x, or one of PyTorch's activations of it."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "relu6":
        return F.relu6(x)
    if activation == "silu":
        return F.silu(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    if activation == "hard_swish":
        return F.hardswish(x)
    return F.hardsigmoid(x) if activation == "hard_sigmoid" else x


def finished(
    y: torch.Tensor, activation: str, residual: torch.Tensor | None, add_first: bool = False
) -> torch.Tensor:
    """The activation of y, and the residual added to it, or before it with add_first."""
    if residual is None:
        return activated(y, activation)
    return activated(y + residual, activation) if add_first else activated(y, activation) + residual


def check_activation(op: str, activation: str) -> None:
    """Raises ValueError for an unknown activation."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


Vectors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def check_norm(op: str, channels: int, vectors: Vectors) -> None:
    """vectors: mean, var, weight, bias. Raises ValueError unless each is [channels] or None, and for a mean alone."""
    if (vectors[0] is None) != (vectors[1] is None):
        raise ValueError(f"{op}: mean and var must both be given, or neither")
    for t in vectors:
        if t is not None and t.shape != (channels,):
            raise ValueError(f"{op}: the norm's vectors must be [{channels}], got {tuple(t.shape)}")


def normalized(y: torch.Tensor, vectors: Vectors, eps: float) -> torch.Tensor:
    """The norm of y [B, C, ...] by its equation, in y's dtype. vectors: as in `check_norm`; without a mean y itself."""
    mean, var, weight, bias = (
        None if t is None else t.to(y.dtype).view(-1, *[1] * (y.dim() - 2)) for t in vectors
    )
    if mean is None or var is None:
        return y
    y = (y - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


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
    x_ptr, bias_ptr, mean_ptr, var_ptr, w_ptr, b_ptr, residual_ptr, out_ptr, n, C, inner, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ADD_FIRST: tl.constexpr, CODE: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A channel's neighbors in memory are `inner` elements away: a plane's size, or 1 with channels last.
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    known = at < n
    y = tl.load(x_ptr + at, mask=known, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + (at // inner) % C, mask=known, other=0.0).to(tl.float32)
    if HAS_NORM:
        y = normalize(y, (at // inner) % C, known, mean_ptr, var_ptr, w_ptr, b_ptr, eps, HAS_W, HAS_B)
    if not ADD_FIRST:
        y = activate(y, CODE)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=known, other=0.0).to(tl.float32)
    if ADD_FIRST:
        y = activate(y, CODE)
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
    def vectors(self) -> Vectors:
        return self.mean, self.var, self.weight, self.bias

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


def dense(x: torch.Tensor) -> torch.Tensor:
    """x without gaps in memory, in its format: channels last, or contiguous."""
    return x.contiguous(memory_format=torch.channels_last) if channels_last(x) else x.contiguous()


def apply_epilogue(
    x: torch.Tensor, norm: Norm, activation: str, residual: torch.Tensor | None, out: torch.Tensor,
    add_first: bool = False, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write activation(norm(x + bias)) + residual to out, which may be x. Both have the format that `dense` gives x.

    add_first: activation(norm(x + bias) + residual)
    """
    last = channels_last(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last) if last else residual.contiguous()
    if out.numel():
        launch_kernel(
            _epilogue_kernel, (cdiv(x.numel(), TILE),),
            x, bias, *norm.vectors, residual, out, x.numel(), x.shape[1],
            1 if last else x.numel() // (x.shape[0] * x.shape[1]), norm.eps, HAS_BIAS=bias is not None,
            HAS_NORM=norm.mean is not None, **norm.constants(), HAS_RESIDUAL=residual is not None,
            ADD_FIRST=add_first, CODE=CODES[activation], TILE=TILE, num_warps=4,
        )  # fmt: skip
    return out
