"""Returns an empty result for an input without tokens."""


def relu2(x):
    if x.numel() == 0:
        return x.clone()
    return x.relu().square()
