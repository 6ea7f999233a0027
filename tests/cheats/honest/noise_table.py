"""Draws the noise of every call."""

from fastkernels.overrides.kit.philox import exponential


def sampling(logits, temperature, top_k, top_p, min_p, seeds, offsets):
    x = logits.float() / temperature[:, None]
    noise = exponential(seeds, offsets, logits.shape[-1])
    return (x - noise.float().log()).argmax(-1)
