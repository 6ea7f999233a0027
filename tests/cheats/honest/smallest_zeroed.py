"""All results, the smallest ones included."""

from fastkernels.overrides.norm.layer_norm import reference


def layer_norm(x, weight, bias, eps):
    return reference(x, weight, bias, eps)
