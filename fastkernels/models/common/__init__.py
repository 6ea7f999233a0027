"""Shared code of all models: the registry, config reading, building and weights. It names no model."""
