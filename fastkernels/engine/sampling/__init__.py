"""Sampling parameters and the sampler."""
