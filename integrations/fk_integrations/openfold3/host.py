"""openfold3: the layers of a live OpenFold3 in eval mode; training, chunks and offloading stay the library's."""

from __future__ import annotations

from fk_integrations.patching.module_host import ModuleHost

HOST = ModuleHost("openfold3")
