"""Who a candidate is compared with: what production runs for an op, under the op's own calling convention.

An adapter calls the library as the hosts do, and nothing more: what a host keeps from call to call (scales on the
device, query starts) is kept here too, what its kernel overwrites is overwritten. Libraries are imported by `make`,
which runs in the baseline's own process; this module itself imports neither them nor what reads results.
"""

from __future__ import annotations

from dataclasses import replace

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, inductor, provider

AGAINST = ("production", "host", "reference")


def baselines(op: str, against: str, device: str) -> list[Baseline]:
    """Those to compare with, also the ones that are not `available` here; empty for an op without a function.

    against  'production': all that production ships, and the reference, last, for what none of it serves;
             'host': vLLM's or SGLang's own; 'reference': plain PyTorch
    Raises UnknownName for an op and ValueError for anything else that does not exist.
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
    # The reference is the last resort, for cases that nothing else serves.
    if against == "reference" or against == "production":
        found.append(replace(reference, device=device))
    return found
