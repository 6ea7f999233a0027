"""Calls the op's own reference unchanged, as a stub does."""

from fastkernels.overrides.activation.silu_and_mul import reference


def silu_and_mul(x):
    return reference(x)
