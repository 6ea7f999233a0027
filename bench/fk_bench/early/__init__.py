"""Refusals of a command line before torch is imported."""
