"""flash-linear-attention: norms and recurrences of a live model of fla.models, or of each one that is built.

Layers call functions of fla.ops by name: they get methods that call ours. In training they call the library's.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fastkernels.core.reasons import Reason
from fastkernels.patch import Request
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.core.lookalikes import PACKAGES, first_package, uncovered
from fk_integrations.patching.in_process import InProcessHost
from fk_integrations.patching.later import Later


def installed_version() -> str | None:
    return versions.installed("fla-core")


class FlaAdapter(Adapter):
    """Targets are the library's modules and functions, and torch's classes."""

    host = "fla"
    first_call = True
    trained = True
    several = True

    def __init__(self) -> None:
        self.version = installed_version() or ""

    def uncovered(self, model: Any) -> dict[Reason, int]:
        return {} if model is None else uncovered(self.host, model)


class FlaHost(InProcessHost):
    """fastkernels.patch.Host for a model of fla.models, or a torch module that contains one."""

    name = "fla"

    def __init__(self) -> None:
        self.later = Later(self, _hook)

    def version(self) -> str | None:
        return installed_version()

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(target, torch.nn.Module):
            return False
        return first_package(target, PACKAGES) == "fla"

    def adapter(self) -> Adapter:
        return FlaAdapter()

    def before_construction(self, request: Request) -> list[dict[str, Any]]:
        return self.later.call(request)


def _language_models() -> Iterator[Any]:
    models = importlib.import_module("fla.models")
    return (cls for name, cls in vars(models).items() if name.endswith("ForCausalLM"))


def _hook(built: Callable[[Any], None], journal: Journal) -> None:
    """Call built(model) after each language model is constructed, or loaded: its weights come after its constructor."""
    for cls in _language_models():
        journal.set_attribute(cls, "__init__", _constructor(cls, built))
        journal.set_attribute(cls, "from_pretrained", classmethod(_loader(cls, built)))


def _constructor(cls: Any, built: Callable[[Any], None]) -> Callable[..., None]:
    theirs = cls.__init__

    @functools.wraps(theirs)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
        if type(self) is cls and not any(p.is_meta for p in self.parameters()):
            built(self)

    return __init__


def _loader(cls: Any, built: Callable[[Any], None]) -> Callable[..., Any]:
    theirs = cls.from_pretrained.__func__

    @functools.wraps(theirs)
    def from_pretrained(kind: Any, *args: Any, **kwargs: Any) -> Any:
        found = theirs(kind, *args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found  # with output_loading_info
        if type(model) is cls:  # not if its constructor has patched it
            built(model)
        return found

    return from_pretrained


HOST = FlaHost()
