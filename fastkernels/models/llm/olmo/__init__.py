"""Ai2's OLMo models."""
