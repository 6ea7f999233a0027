"""Takes as long as it takes."""

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x_ptr, out_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * D + D + cols, mask=cols < D, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * D + cols, (silu * up).to(out_ptr.dtype.element_ty), mask=cols < D)


def silu_and_mul(x):
    d = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], d), dtype=x.dtype, device=x.device)
    _kernel[(x.shape[0], triton.cdiv(d, 1024))](x, out, d, BLOCK=1024, num_warps=8)
    return out
