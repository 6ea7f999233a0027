"""Drop-in classes without a live seam."""

from __future__ import annotations

from fk_integrations.patching.seam_interface import Seam


class Standalone(Seam):
    """A class for forks and our own engine; the target's note says why it does not go into a live host."""

    live = False
