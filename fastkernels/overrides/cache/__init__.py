"""Stores into the paged KV cache."""
