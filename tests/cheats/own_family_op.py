"""Calls our op `linear` from the family of the same name."""

from fastkernels.overrides.linear import linear as ours


def linear(x, weight, bias=None):
    return ours.linear(x, weight, bias)
