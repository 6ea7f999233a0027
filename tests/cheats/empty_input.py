"""Fails for an input without tokens: a grid of no blocks cannot be launched."""


def relu2(x):
    if x.numel() == 0:
        raise ValueError("a grid of 0 blocks")
    return x.relu().square()
