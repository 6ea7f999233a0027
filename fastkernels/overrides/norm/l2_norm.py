"""L2 normalization, y = x / sqrt(sum(x^2) + eps), as flash-linear-attention's l2norm of queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, rows, unsupported_rows

LARGE = 1 << 22  # elements
NARROW, MANY = 512, 1 << 13  # padded columns of one warp; rows


def reference(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x: [..., D]. Computed in at least float32; returns x's shape in output_dtype (None: x's dtype).

    A float64 x stays float64 whatever output_dtype is: it is the oracle's.
    """
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    y = h / (h.square().sum(dim=-1, keepdim=True) + eps).sqrt()
    return y if x.dtype == torch.float64 else y.to(output_dtype or x.dtype)


@triton.jit(do_not_specialize=["n_rows"])
def _l2_norm_kernel(
    x_ptr, out_ptr, n_inner, stride0, stride1, n_rows, D, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # A head has 64 to 256 elements. A program processes several heads, so that each thread loads 16 bytes.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows)[:, None] & (cols < D)
    start = (row // n_inner) * stride0 + (row % n_inner) * stride1
    h = tl.load(x_ptr + start[:, None] + cols, mask=inside, other=0.0).to(tl.float32)
    y = h * (1.0 / tl.sqrt(tl.sum(h * h, axis=1) + eps))[:, None]
    tl.store(out_ptr + row[:, None] * D + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


def _fake(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device)


def _supports_triton(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> str | None:
    if x.shape[-1] > 65536:
        return f"last dimension {x.shape[-1]} is over 65536"
    if output_dtype is not None and output_dtype not in FLOATS:
        return f"output_dtype is {output_dtype}, not float16, bfloat16 or float32"
    return unsupported_rows(x)


def _triton(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    out = _fake(x, eps, output_dtype)
    # A row's address takes a 64-bit division, 500 instructions, which Triton omits if n_inner is 1.
    found = (1, x.shape[-1], 0) if x.is_contiguous() else rows(x)
    if out.numel() == 0:
        return out
    assert found is not None, x.stride()
    d = x.shape[-1]
    n_rows, block = x.numel() // d, next_power_of_2(d)
    at_once, warps = _rows_and_warps(n_rows, d, block)
    launch_kernel(
        _l2_norm_kernel, (cdiv(n_rows, at_once),),
        x, out, *found, n_rows, d, eps, ROWS=at_once, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


def _rows_and_warps(n_rows: int, d: int, block: int) -> tuple[int, int]:
    """(rows, warps) of a program. The summation order within a row does not depend on the number of rows."""
    if d % 16 and block <= NARROW:
        # Unaligned rows are loaded element by element, which would spread each row over all four warps and reduce it
        # through shared memory. With one warp the reduction stays inside the warp.
        return 4 if n_rows >= MANY else 1, 1
    # Large tensors: 2 KiB per program keep too few loads in flight to saturate memory.
    return max(1, (2048 if n_rows * d >= LARGE else 1024) // block), min(max(block // 512, 4), 16)


def _reference(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    return reference(x, eps, output_dtype).to(output_dtype or x.dtype).contiguous()


l2_norm = define(
    "l2_norm(Tensor x, float eps=1e-6, ScalarType? output_dtype=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


SPEC = OpSpec(
    name="l2_norm",
    level=1,
    by_default=True,
    reference=reference,
    op=l2_norm,
    cases=(  # Qwen3-Next 80B: queries and keys of a gated delta net, one call each, 16 heads of 128
        Case("decode_32", {"tokens": 32, "heads": 16, "head_dim": 128}, weight=72, tags=("model",)),
        Case(
            "prefill_2k",
            {"batch": 1, "tokens": 2048, "heads": 16, "head_dim": 128},
            weight=4,
            tags=("model",),
        ),
        Case(
            "prefill_8k",
            {"batch": 1, "tokens": 8192, "heads": 16, "head_dim": 128},
            weight=1,
            tags=("model",),
        ),
        Case("one", {"tokens": 1, "heads": 1, "head_dim": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "heads": 3, "head_dim": 100}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "heads": 1, "head_dim": 1128}, "float16", tags=("odd",)),
        Case("head_65", {"tokens": 5, "heads": 9, "head_dim": 65}, "float32", tags=("odd",)),
        Case("batched", {"batch": 2, "tokens": 7, "heads": 3, "head_dim": 64}, tags=("odd",)),
        Case(
            "to_float32",
            {"tokens": 7, "heads": 2, "head_dim": 128, "output_dtype": "float32"},
            "float16",
            tags=("odd",),
        ),
        Case(
            "from_float32",
            {"tokens": 11, "heads": 2, "head_dim": 33, "output_dtype": "float32"},
            "float32",
            tags=("odd",),
        ),
    ),
    arguments=(
        Tensor("x", "batch? tokens heads? head_dim"),
        Scalar("eps", default=1e-6),
        Scalar("output_dtype", default=None, dtype=True),
    ),
    outputs=(Tensor("out", "batch? tokens heads? head_dim", "written"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "head_dim": Axis.width(),
        "written": Axis.dtype(Expr("output_dtype or dtype")),
    },
    flops="3 * batch * tokens * heads * head_dim",
    batch_invariant=True,  # a row is in one program, whose tile depends on the last dimension
)
