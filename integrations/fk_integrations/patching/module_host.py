"""Hosts that are libraries of torch modules: live models are patched, without a hook for those that are built later."""

from __future__ import annotations

import sys
from typing import Any

from fastkernels.core.reasons import Reason
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.lookalikes import PACKAGES, first_package, uncovered
from fk_integrations.patching.in_process import InProcessHost


class ModuleAdapter(Adapter):
    """Targets are the library's modules, and torch's classes.

    package   the library's name in Target.host
    checkout  the version of a library that is imported from a checkout, without an installation
    """

    first_call = True
    trained = True
    several = True

    def __init__(self, package: str, checkout: str = "") -> None:
        self.host, self.version = package, versions.installed(package) or checkout

    def uncovered(self, model: Any) -> dict[Reason, int]:
        return {} if model is None else uncovered(self.host, model)


class ModuleHost(InProcessHost):
    """fastkernels.patch.Host for a torch module that contains modules of the library `name`.

    checkout: see ModuleAdapter
    """

    def __init__(self, name: str, checkout: str = "") -> None:
        self.name, self._checkout = name, checkout

    def version(self) -> str | None:
        return versions.installed(self.name) or self._checkout or None

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(target, torch.nn.Module):
            return False
        return first_package(target, PACKAGES) == self.name

    def adapter(self) -> Adapter:
        return ModuleAdapter(self.name, self._checkout)
