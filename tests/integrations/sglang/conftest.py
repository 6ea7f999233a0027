"""Fixtures of the SGLang checks."""

from support.checks import candidate, folder

__all__ = ["candidate", "folder"]
