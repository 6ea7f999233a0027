"""Attention of all queries to all keys without a cache: encoders, diffusion models, and SwinV2's windows."""
