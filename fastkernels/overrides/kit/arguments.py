"""Arguments that our function in the place of a host's does not support."""

from __future__ import annotations


class UnsupportedArgument(ValueError):
    """Our function does not support these arguments. Raised before it changes a tensor.

    In a patched model the host's function runs instead.
    """
