"""Sampling of next tokens from logits."""
