"""Modules of a host of language models that resemble a class that an op replaces, without being one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.lookalikes import with_reason
from fk_integrations.patching import seam_interface

# {op: parts of the names of classes of its family}, for classes whose name contains no class of a target
FAMILIES = {
    "silu_and_mul": ("AndMul", "MulAnd"), "rms_norm": ("Norm",), "rotary_emb": ("Rotary",), "attention": ("Attention",),
}  # fmt: skip


def relatives(adapter: Adapter, op: str, model: Any) -> dict[Reason, int]:
    """{reason: modules} of modules that resemble a class of the op, and whose own class no target names.

    A subclass resembles the op of the class that it inherits from. A module without parts resembles the op with the
    longest class name in its own name, else the family in `FAMILIES` of which its name contains a part. Layers that
    the host serves as those of a target (HostOp.serves) are none.
    """
    if model is None:
        return {}
    classes = _classes(adapter)
    found: Counter[Reason] = Counter()
    served = adapter.of(op).serves
    others = (m for m in model.modules() if not served(m))
    for kind, modules in Counter((type(m), next(m.children(), None) is None) for m in others).items():
        cls, leaf = kind
        theirs = cls.__module__.startswith(f"{adapter.host}.") and not hasattr(cls, "fastkernels")
        if not theirs or cls in classes:
            continue
        base = next((c for c in cls.__mro__ if c in classes), None)
        resembled = classes[base] if base is not None else _by_name(cls.__name__, classes) if leaf else None
        if resembled == op:
            what = "a subclass" if base is not None else f"which is not one that {op} replaces"
            found[Reason(Kind.OTHER_CLASS, with_reason(cls, adapter.host, what))] += modules
    return dict(found)


def _classes(adapter: Adapter) -> dict[type, str]:
    """{class of modules that a target with a live seam names: op}, of those that this process has imported."""
    found = {}
    for op in registry.op_names():
        for target in registry.get(op).targets_for(adapter.host, adapter.version or None):
            module, _, name = target.path.partition(":")
            cls = getattr(sys.modules.get(module), name, None)
            if isinstance(cls, type) and issubclass(cls, nn.Module) and seam_interface.find(target.seam).live:
                found[cls] = op
    return found


def _by_name(name: str, classes: Mapping[type, str]) -> str | None:
    alike = {cls.__name__: op for cls, op in classes.items() if cls.__name__ in name}
    if alike:
        return alike[max(alike, key=len)]
    return next((op for op, parts in FAMILIES.items() if any(part in name for part in parts)), None)
