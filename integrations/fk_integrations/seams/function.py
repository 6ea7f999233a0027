"""Functions of a host."""

from __future__ import annotations

from fk_integrations.patching.seam_interface import Seam


class Function(Seam):
    """A function that forks replace; a live host keeps its own, which other models may share."""

    live = False
