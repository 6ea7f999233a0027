"""torchrec: embedding bags and cross networks of a live model, unsharded; sharded modules stay the library's."""

from __future__ import annotations

from fk_integrations.patching.module_host import ModuleHost

HOST = ModuleHost("torchrec")
