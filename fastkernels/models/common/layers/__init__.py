"""Modules that models share, built from their descriptions."""
