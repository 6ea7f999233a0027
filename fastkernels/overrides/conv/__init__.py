"""Ops on images and sequences of frames: convolutions, batch norm, pooling windows, resampling. Layout: [B, C, ...]."""
