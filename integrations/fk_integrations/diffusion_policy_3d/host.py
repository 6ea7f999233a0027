"""diffusion_policy_3d: the blocks of DP3's UNets in a live model."""

from __future__ import annotations

from fk_integrations.patching.module_host import ModuleHost

HOST = ModuleHost("diffusion_policy_3d", checkout="0.0.0")
