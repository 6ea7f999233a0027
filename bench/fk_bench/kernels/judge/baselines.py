"""The baselines of an op: what production runs for it, listed in the production.py of its family.

An adapter calls the library exactly as the hosts do: state that a host keeps between calls (scales on the device, query
starts) is kept as well, and what its kernel overwrites is overwritten. Libraries are imported by `make`, in the
baseline's own process.
"""

from __future__ import annotations

from dataclasses import replace

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, inductor, provider

AGAINST = ("production", "host", "reference")


def baselines(op: str, against: str, device: str) -> list[Baseline]:
    """The baselines of an op, including those that are not `available` here; empty for an op without a function.

    against  'production': all that production ships, and last the reference, for cases that none of it supports;
             'host': vLLM's or SGLang's own; 'reference': plain PyTorch
    Raises UnknownName for an op, and ValueError for an unknown `against`.
    """
    if against not in AGAINST:
        raise ValueError(f"against {against!r} is not one of {', '.join(AGAINST)}")
    spec = registry.get(op)
    if spec.op is None:
        return []
    reference = Baseline("reference", "reference", lambda: provider(op, "reference"), devices=("cuda", "cpu"))
    found: list[Baseline] = []
    if against != "reference":
        found += registry.baselines(op) or [inductor(op)]
        found = [b for b in found if device in b.devices and (against == "production" or b.kind == "host")]
    found = [replace(b, device=device) for b in found]
    # The reference is the fallback for cases that no other baseline supports.
    if against == "reference" or against == "production":
        found.append(replace(reference, device=device))
    return found
