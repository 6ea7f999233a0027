"""Scenes that are rendered from cameras: 3-D Gaussians and hash-encoded radiance fields."""
