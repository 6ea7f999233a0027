"""torch_geometric: LightGCN's layers in a live model."""

from __future__ import annotations

from fk_integrations.patching.module_host import ModuleHost

HOST = ModuleHost("torch_geometric")
