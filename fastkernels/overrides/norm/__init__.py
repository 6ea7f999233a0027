"""Normalizations over the last dimension, with residual add."""
