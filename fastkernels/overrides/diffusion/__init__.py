"""Ops of image and video diffusion: modulated and group norms, gated GELU, embeddings of time steps, rotary queries."""
