"""Functions that a library offers: its modules get ours, for all callers in the process."""

from __future__ import annotations

from fk_integrations.patching.seam_interface import Seam


class LibraryFunction(Seam):
    """A function of a library without models of its own. patching/function_host.py puts ours in, not into modules."""

    live = False
