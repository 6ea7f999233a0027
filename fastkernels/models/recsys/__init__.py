"""Recommendation and specialized models, text embedders among them."""
