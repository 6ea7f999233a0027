"""Sinusoidal embedding of diffusion time steps (Ho et al., arXiv 2006.11239)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.declaration import Call
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, Tolerance
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(
    timesteps: torch.Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool = False,
    downscale_freq_shift: float = 1.0,
    scale: float = 1.0,
    max_period: int = 10000,
) -> torch.Tensor:
    """timesteps: [N], of any dtype. Returns [N, embedding_dim] in float32 (float64 for float64): sines, then cosines.

    flip_sin_to_cos: cosines first. Frequencies fall from 1 to 1 / max_period; an odd embedding_dim ends with a zero.
    """
    acc = torch.float64 if timesteps.dtype == torch.float64 else torch.float32
    half = embedding_dim // 2
    steps = torch.arange(half, dtype=acc, device=timesteps.device)
    frequencies = torch.exp(-math.log(max_period) * steps / (half - downscale_freq_shift))
    angles = scale * (timesteps.to(acc)[:, None] * frequencies)
    parts = (angles.cos(), angles.sin()) if flip_sin_to_cos else (angles.sin(), angles.cos())
    return F.pad(torch.cat(parts, dim=-1), (0, embedding_dim % 2))


@triton.jit(do_not_specialize=["stride"])
def _timestep_embedding_kernel(
    t_ptr, out_ptr, stride, D, step, scale, COS_FIRST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    half = D // 2
    cols = tl.arange(0, BLOCK)
    second = cols >= half
    i = tl.where(second, cols - half, cols).to(tl.float32)
    angle = scale * (tl.load(t_ptr + row * stride).to(tl.float32) * tl.exp(i * step))
    y = tl.where(second != COS_FIRST, tl.cos(angle), tl.sin(angle))
    tl.store(out_ptr + row * D + cols, tl.where(cols < 2 * half, y, 0.0), mask=cols < D)


def _check(timesteps: torch.Tensor, embedding_dim: int) -> None:
    if timesteps.dim() != 1:
        raise ValueError(f"timestep_embedding: timesteps must be [N], got shape {tuple(timesteps.shape)}")
    if embedding_dim < 2:
        raise ValueError(f"timestep_embedding: embedding_dim must be at least 2, got {embedding_dim}")


def _triton(
    timesteps: torch.Tensor, embedding_dim: int, flip_sin_to_cos: bool = False, downscale_freq_shift: float = 1.0,
    scale: float = 1.0, max_period: int = 10000,
) -> torch.Tensor:  # fmt: skip
    _check(timesteps, embedding_dim)
    out = torch.empty(len(timesteps), embedding_dim, dtype=torch.float32, device=timesteps.device)
    if out.numel() == 0:
        return out
    step = -math.log(max_period) / (embedding_dim // 2 - downscale_freq_shift)
    launch_kernel(
        _timestep_embedding_kernel, (len(timesteps),),
        timesteps, out, timesteps.stride(0), embedding_dim, step, float(scale),
        COS_FIRST=flip_sin_to_cos, BLOCK=next_power_of_2(embedding_dim), num_warps=4,
    )  # fmt: skip
    return out


def _supports_triton(timesteps: torch.Tensor, *_: object) -> str | None:
    return "timesteps are float64, computed as such" if timesteps.dtype == torch.float64 else None


def _reference(
    timesteps: torch.Tensor, embedding_dim: int, flip_sin_to_cos: bool = False, downscale_freq_shift: float = 1.0,
    scale: float = 1.0, max_period: int = 10000,
) -> torch.Tensor:  # fmt: skip
    _check(timesteps, embedding_dim)
    return reference(timesteps, embedding_dim, flip_sin_to_cos, downscale_freq_shift, scale, max_period)


def _fake(timesteps: torch.Tensor, embedding_dim: int, *_: object, **__: object) -> torch.Tensor:
    wide = torch.float64 if timesteps.dtype == torch.float64 else torch.float32
    return torch.empty(timesteps.shape[0], embedding_dim, dtype=wide, device=timesteps.device)


timestep_embedding = define(
    "timestep_embedding(Tensor timesteps, int embedding_dim, bool flip_sin_to_cos=False,"
    " float downscale_freq_shift=1.0, float scale=1.0, int max_period=10000) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _times(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (call.rand(*shape) * 999).to(dtype)


SPEC = OpSpec(
    name="timestep_embedding",
    level=1,
    reference=reference,
    op=timestep_embedding,
    cases=(  # FLUX.1 and SDXL: the step, and the six sizes of each of two images
        Case("flux", {"tokens": 1, "embedding_dim": 256, "flip_sin_to_cos": True, "downscale_freq_shift": 0.0},
             weight=2, tags=("model",)),
        Case("sdxl", {"tokens": 2, "embedding_dim": 320, "flip_sin_to_cos": True, "downscale_freq_shift": 0.0},
             "float32", tags=("model",)),
        Case("sdxl_sizes", {"tokens": 12, "embedding_dim": 256, "flip_sin_to_cos": True, "downscale_freq_shift": 0.0},
             "float32", tags=("model",)),
        Case("one", {"tokens": 1, "embedding_dim": 5}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "embedding_dim": 1000}, tags=("odd",)),
        Case("odd_7", {"tokens": 7, "embedding_dim": 64, "downscale_freq_shift": 0.0}, "float32", tags=("odd",)),
        Case("odd_129", {"tokens": 3, "embedding_dim": 129, "max_period": 500, "scale": 0.5}, "float16", tags=("odd",)),
    ),
    arguments=(
        Tensor("timesteps", "tokens", values=_times),
        Scalar("embedding_dim"),
        Scalar("flip_sin_to_cos", default=False),
        Scalar("downscale_freq_shift", default=1.0),
        Scalar("scale", default=1.0),
        Scalar("max_period", default=10000),
    ),
    outputs=(Tensor("out", "tokens embedding_dim", "float32"),),
    axes={"tokens": Axis.per_call(), "embedding_dim": Axis.width()},
    constraints=("embedding_dim // 2 > downscale_freq_shift",),
    constructor={"num_channels": "embedding_dim"},
    flops="4 * tokens * embedding_dim",
    # An angle of 999 has an error of 6e-5 in float32.
    tolerance={d: Tolerance(4e-4, 1e-4) for d in ("float32", "float16", "bfloat16")},
    activations=(),
)  # fmt: skip
