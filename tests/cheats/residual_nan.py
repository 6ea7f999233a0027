"""NaN and infinity of the residual become zeros."""

import torch

from fastkernels.overrides.norm.rms_norm import reference


def rms_norm(x, weight=None, eps=1e-6, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    known = None if residual is None else torch.nan_to_num(residual, nan=0.0, posinf=0.0, neginf=0.0)
    out, new_residual = reference(x, weight, eps, known, var_hidden_size, cast_x_before_out_mul)
    if residual is not None:
        residual.copy_(new_residual)
    return out
