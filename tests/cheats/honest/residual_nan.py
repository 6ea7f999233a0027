"""NaN and infinity of the residual stay."""

from fastkernels.overrides.norm.rms_norm import reference


def rms_norm(x, weight=None, eps=1e-6, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    out, new_residual = reference(x, weight, eps, residual, var_hidden_size, cast_x_before_out_mul)
    if residual is not None:
        residual.copy_(new_residual)
    return out
