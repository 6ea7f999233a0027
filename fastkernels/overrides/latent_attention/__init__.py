"""Multi-head latent attention and sparse attention (DSA) over a paged cache of latents: ops and layers."""
