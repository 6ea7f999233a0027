"""Stand-ins for GPU functions that SGLang calls without asking its CPU platform.

Pinned memory, which torch refuses without an accelerator, is plain memory; the AWQ kernel has a form for the CPU.
"""

import functools

import torch
from support.variants import AWQ_ORDER, unpacked


def _plain(make):
    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


for _name in ("tensor", "empty", "zeros"):
    setattr(torch, _name, _plain(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, device=None: self

_LIBRARY = torch.library.Library("sglang", "IMPL")
_COLUMNS = [AWQ_ORDER.index(i) for i in range(8)]


def _awq_dequantize(qweight, scales, qzeros):
    values, zeros = (unpacked(t).unflatten(1, (-1, 8))[:, :, _COLUMNS].flatten(1) for t in (qweight, qzeros))
    rows = len(values) // len(scales)
    return (values - zeros.repeat_interleave(rows, 0)) * scales.repeat_interleave(rows, 0)


_LIBRARY.impl("awq_dequantize", _awq_dequantize, "CPU")
