"""What a stub is: the op's own reference, called and left as it is."""

from fastkernels.overrides.activation.silu_and_mul import reference


def silu_and_mul(x):
    return reference(x)
