"""Caches by the arguments that are not tensors."""

from functools import lru_cache, partial

import torch.nn.functional as F


@lru_cache(maxsize=8)
def _activation(approximate: str):
    return partial(F.gelu, approximate=approximate)


def gelu_and_mul(x, approximate="none"):
    gate, up = x.chunk(2, dim=-1)
    return _activation(approximate)(gate) * up
