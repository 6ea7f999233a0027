"""Views its own input through strides."""

import torch.nn.functional as F


def silu_and_mul(x):
    d = x.shape[-1] // 2
    x = x.contiguous()
    both = x.as_strided((2, *x.shape[:-1], d), (d, *x.stride()), x.storage_offset())
    return F.silu(both[0]) * both[1]
