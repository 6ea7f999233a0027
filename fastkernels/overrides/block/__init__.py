"""Blocks of transformer layers: MLPs, attention blocks and decoder layers."""
