"""Metrics of outputs, one a file: what a user would notice if a kernel were wrong, family by family."""
