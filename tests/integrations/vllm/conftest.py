"""Fixtures of the vLLM checks."""

from support.checks import candidate, folder

__all__ = ["candidate", "folder"]
