"""Cohere's Command models."""
