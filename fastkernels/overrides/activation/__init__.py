"""Activations: elementwise kernels and the gated SiLU and GELU."""
