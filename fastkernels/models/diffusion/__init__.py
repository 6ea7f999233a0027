"""Diffusion pipelines: text to images."""
