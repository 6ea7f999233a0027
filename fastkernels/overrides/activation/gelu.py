"""Gaussian error linear unit, y = x * Phi(x), exact or with tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Case, OpSpec, Scalar
from fastkernels.overrides.kit import elementwise
from fastkernels.overrides.kit.elementwise import normal_cdf
from fastkernels.overrides.kit.overlap import follow
from fastkernels.overrides.kit.rows import unsupported_rows


def reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x: [..., d]; approximate: 'none' (erf) or 'tanh'. Computed in at least float32; returns x's shape and dtype."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    # Not F.gelu: on the CPU it rounds the elements after a row's last full vector differently.
    if approximate == "tanh":
        cdf = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h * h * h)))
    else:
        cdf = 0.5 * (1 + torch.erf(h * math.sqrt(0.5)))
    return (h * cdf).to(x.dtype)


@triton.jit(do_not_specialize=["n_tiles"])
def _gelu_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, D, n_tiles,
    TANH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    pid = tl.program_id(0)
    row = (pid // n_tiles).to(tl.int64)
    cols = (pid % n_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    x_at = x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols
    x = tl.load(x_at, mask=cols < D, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif x_ptr.dtype.element_ty == tl.float32:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * normal_cdf(x)
    tl.store(out_ptr + row * D + cols, y.to(out_ptr.dtype.element_ty), mask=cols < D)


def _check(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")


def _triton(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    _check(approximate)
    return elementwise.launch(_gelu_kernel, x, TANH=approximate == "tanh")


def _reference(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    _check(approximate)
    return reference(x, approximate).contiguous()


gelu = define(
    'gelu(Tensor x, str approximate="none") -> Tensor',
    fake=elementwise.like,
    providers=(
        Provider("triton", _triton, supports=lambda x, approximate="none": unsupported_rows(x)),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, dims: dict[str, int], approximate: str, dtype: str, weight: float, tag: str) -> Case:
    return Case(name, {**dims, "approximate": approximate}, dtype, weight, (tag,))


SPEC = OpSpec(
    name="gelu",
    level=1,
    by_default=True,
    reference=reference,
    op=gelu,
    cases=(  # GPT-2 XL; Whisper large-v3's encoder, 1500 frames of 30 s; SigLIP so400m, 729 patches an image
        _case("decode_1", {"tokens": 1, "d": 6400}, "tanh", "bfloat16", 48, "model"),
        _case("decode_32", {"tokens": 32, "d": 6400}, "tanh", "bfloat16", 48, "model"),
        _case("prefill_8k", {"tokens": 8192, "d": 6400}, "tanh", "bfloat16", 1, "model"),
        _case("audio_8", {"tokens": 8, "inner": 1500, "d": 5120}, "none", "bfloat16", 32, "model"),
        _case("images_16", {"tokens": 16, "inner": 729, "d": 4304}, "tanh", "bfloat16", 27, "model"),
        _case("one", {"tokens": 1, "d": 1}, "none", "float32", 1, "odd"),
        _case("tanh_one", {"tokens": 1, "d": 1}, "tanh", "float32", 1, "odd"),
        _case("tanh_1000", {"tokens": 63, "d": 1000}, "tanh", "bfloat16", 1, "odd"),
        _case("erf_1128", {"tokens": 3, "d": 1128}, "none", "float16", 1, "odd"),
        _case("erf_1025", {"tokens": 1, "d": 1025}, "none", "bfloat16", 1, "odd"),
        _case("tanh_batched", {"tokens": 2, "inner": 7, "d": 63}, "tanh", "float32", 1, "odd"),
        _case("erf_batched", {"tokens": 2, "inner": 7, "d": 63}, "none", "float32", 1, "odd"),
        _case("tanh_wide", {"tokens": 2, "d": 5001}, "tanh", "float16", 1, "odd"),
    ),
    arguments=(elementwise.X, Scalar("approximate")),
    outputs=(elementwise.OUT,),
    axes=elementwise.AXES,
    flops="9 * tokens * inner * d",
    batch_invariant=True,  # elementwise
)
