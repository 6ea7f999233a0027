"""Float8 e4m3 scales and values for quantizing ops, in PyTorch and in Triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

ValuesAndScales = tuple[torch.Tensor, torch.Tensor]
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_ABSMAX = 1 / 512  # least absolute maximum of a tensor, a token or a norm's group in vLLM
GROUP_EPS = 1e-10  # least absolute maximum of a group, in both hosts
MAX_COLUMNS = 65536
# Triton's interpreter (3.6) converts to float8 without rounding to nearest even and without carrying.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def fp8_refusal(device: torch.device) -> str | None:
    """Return why Triton cannot convert from and to float8_e4m3fn on the device, None if it can."""
    if device.type == "cuda" and _capability(device) < (8, 9):
        return "Triton converts to float8_e4m3fn from compute capability 8.9 on"
    return None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def scales_of(absmax: torch.Tensor, min_absmax: float, ue8m0: bool) -> torch.Tensor:
    """Scales that map max(absmax, min_absmax) to 448; ue8m0: rounded up to a power of two."""
    scale = absmax.clamp(min=min_absmax) / FP8_MAX
    if not ue8m0:
        return scale
    mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(scale == 0, scale, power)


def quantized(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """y / scale, clamped to +-448, in float8 e4m3; a float64 y is not rounded. A scale of 0 gives 0."""
    inverse = torch.where(scale == 0, torch.zeros_like(scale), scale.reciprocal())
    out = (y * inverse).clamp(-FP8_MAX, FP8_MAX)
    return out if y.dtype == torch.float64 else out.to(FP8)


def quantize_rows(
    y: torch.Tensor,
    scale: torch.Tensor | None,
    group_size: int,
    scale_ub: torch.Tensor | None,
    min_absmax: float,
    ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of the quantizing ops: y [..., N] in float32 or float64; see quantize_fp8.reference.

    NaN stays NaN and has no part in a scale, as in the hosts' kernels.
    """
    if scale is not None:
        return quantized(y, scale.to(y.dtype).reshape(1)), scale.to(y.dtype).reshape(1)
    if group_size == 0:
        absmax = _sizes(y).amax() if y.numel() else y.new_zeros(())
        scales = scales_of(absmax.reshape(1), min_absmax, ue8m0)
        return quantized(y, scales), scales
    size = y.shape[-1] if group_size < 0 else group_size
    groups = y.unflatten(-1, (y.shape[-1] // size, size))
    absmax = _sizes(groups).amax(dim=-1)
    if scale_ub is not None:
        absmax = absmax.minimum(scale_ub.to(y.dtype))
    scales = scales_of(absmax, min_absmax, ue8m0)
    return quantized(groups, scales.unsqueeze(-1)).flatten(-2), scales


def _sizes(y: torch.Tensor) -> torch.Tensor:
    """Absolute values; 0 for NaN."""
    return y.abs().nan_to_num(nan=0.0, posinf=float("inf"))


def check(name: str, columns: int, scale: torch.Tensor | None, group_size: int) -> None:
    """Raise ValueError for arguments that no kernel supports. columns: of the output."""
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"{name}: scale must have one value, got shape {tuple(scale.shape)}")
    if group_size < -1:
        raise ValueError(
            f"{name}: group_size {group_size} is neither -1 (a token), 0 (the tensor) nor positive"
        )
    if columns == 0 or (scale is None and group_size > 0 and columns % group_size):
        raise ValueError(f"{name}: {columns} columns are not a multiple of group_size {group_size}")


def empty_outputs(
    shape: tuple[int, ...] | torch.Size,
    device: torch.device,
    per_tensor: bool,
    group_size: int,
    column_major: bool = False,
    tma_aligned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [..., N] float8, scales float32): [1] per tensor, else [..., N / group_size].

    Column-major scales have adjacent tokens adjacent in memory; tma_aligned pads each column to a multiple of 4 tokens.
    """
    values = torch.empty(shape, dtype=FP8, device=device)
    if per_tensor:
        return values, torch.empty(1, dtype=torch.float32, device=device)
    columns = 1 if group_size < 0 else shape[-1] // group_size
    if not column_major:
        return values, torch.empty((*shape[:-1], columns), dtype=torch.float32, device=device)
    *batch, tokens = shape[:-1]
    padded = -(-tokens // 4) * 4 if tma_aligned else tokens
    scales = torch.empty((*batch, columns, padded), dtype=torch.float32, device=device)
    return values, scales.transpose(-1, -2)[..., :tokens, :]


def column_major(scales: torch.Tensor, wanted: bool, tma_aligned: bool = False) -> torch.Tensor:
    """Scales [..., T, columns] in the layout of empty_outputs, or as they are if no other one is wanted."""
    if not wanted or scales.dim() < 2:
        return scales
    *batch, tokens, columns = scales.shape
    padded = -(-tokens // 4) * 4 if tma_aligned else tokens
    return scales.new_empty((*batch, columns, padded)).transpose(-1, -2)[..., :tokens, :].copy_(scales)


def laid_out(
    found: tuple[torch.Tensor, torch.Tensor],
    per_tensor: bool,
    group_size: int,
    column_major: bool = False,
    tma_aligned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of quantize_rows in the dtypes and memory layout of an op's outputs."""
    values, scales = found
    shape, device = values.shape, values.device
    values = values.to(FP8)
    out = empty_outputs(shape, device, per_tensor, group_size, column_major, tma_aligned)[1]
    return values, out.copy_(scales)


@triton.jit
def fp8_scale(absmax, min_absmax, UE8M0: tl.constexpr):
    scale = tl.div_rn(tl.maximum(absmax, min_absmax), 448.0)
    if UE8M0:  # any bit of the mantissa carries into the exponent
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def fp8_inverse(scale):
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def to_fp8(y):
    y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:  # round by adding and subtracting the power of two whose last bit is the fourth of y
        exponent = (y.to(tl.int32, bitcast=True) >> 23) & 0xFF
        power = ((tl.maximum(exponent, 121) + 20) << 23).to(tl.float32, bitcast=True)
        rounded = tl.where(y < 0, -((-y + power) - power), (y + power) - power)
        bits = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(y == y, bits, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)  # it loses NaN, too
    return y.to(tl.float8e4nv)
