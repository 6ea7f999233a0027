"""The baselines of an op: what production runs for it, listed in the production.py of its family.

An adapter calls the library exactly as the hosts do: state that a host keeps between calls (scales on the device, query
starts) is kept as well, and what its kernel overwrites is overwritten. Libraries are imported by `make`, in the
baseline's own process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline, inductor, provider, refusing

AGAINST = ("production", "host", "reference")

# {module: package that has it}, where the names differ
PACKAGES = {
    "flash_maxsim": "flash-maxsim", "late_interaction_kernels": "late-interaction-kernels",
    "sgl_kernel": "sgl-kernel", "flashinfer": "flashinfer-python", "fla": "flash-linear-attention",
    "deep_gemm": "deep-gemm", "triton_kernels": "triton-kernels",
}  # fmt: skip


@dataclass(frozen=True)
class Production:
    """The baselines of an op that are production's: kernels of hosts and libraries. Compilers are none.

    usable   names of those that can be tried here; missing: {name: packages} of those whose libraries are not there
    """

    usable: tuple[str, ...]
    missing: Mapping[str, tuple[str, ...]]


def production(found: Sequence[Baseline]) -> Production:
    """The baselines of production among those of an op: usable and missing ones."""
    ours = [b for b in found if b.kind in ("host", "library")]
    absent = {b.name: packages(b) for b in ours if b.available() is not None}
    return Production(tuple(b.name for b in ours if b.name not in absent), absent)


def packages(baseline: Baseline) -> tuple[str, ...]:
    """The packages that a baseline needs; of modules that replace each other, the first one's."""
    modules = [m if isinstance(m, str) else m[0] for m in baseline.modules]
    names = [m.partition(".")[0] for m in modules]
    return tuple(dict.fromkeys(PACKAGES.get(n, n) for n in names))


def why_provisional(missing: Mapping[str, Sequence[str]], broken: Mapping[str, str]) -> str:
    """Why a speedup is no score where none of production's kernels can be used, with the command that installs them.

    missing  {baseline: packages}; broken: {baseline: the error with which its library does not load}
    """
    parts = [f"{name} is not installed" for name in missing] + [
        f"{name} does not load ({why[:120]})" for name, why in broken.items()
    ]
    wanted = dict.fromkeys(p for ps in missing.values() for p in ps)
    command = f"pip install {' '.join(wanted)}" if wanted else "repair the installation"
    return (
        f"The baseline is no kernel of production: {', '.join(parts)}. Install them ({command}), or name an interpreter"
        " that has them (--python baseline=PATH)"
    )


def baselines(op: str, against: str, device: str) -> list[Baseline]:
    """The baselines of an op, including those that are not `available` here; empty for an op without a function.

    against  'production': all that production ships, then the reference as Inductor compiles it, and last the
             reference, for cases that none of these supports;
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
        found += registry.baselines(op)
        compiled = bool(spec.ranks) or any(b.kind == "compiler" for b in found)
        if against == "production" and not compiled:
            found.append(inductor(op))  # the least that a host runs
        found = [b for b in found if device in b.devices and (against == "production" or b.kind == "host")]
    found = [replace(b, device=device) for b in found]
    # The reference is the fallback for cases that no other baseline supports.
    if against == "reference" or against == "production":
        found.append(replace(reference, device=device))
    return found


def of_block(name: str, device: str) -> list[Baseline]:
    """The modules of hosts that compute a block of a model, or why a host has none.

    `make` of each returns build(args) -> call, as OpSpec.build does.
    """
    points = sorted(entry_points(group="fastkernels.hosts"), key=lambda p: p.name)
    if not points:
        why = "the integrations with hosts are not installed: pip install fastkernels"
        return [refusing("hosts", why)]
    hosts = [point.load() for point in points]
    found = [b for h in hosts if hasattr(h, "block_baselines") for b in h.block_baselines(name)]
    return [replace(b, device=device) for b in found if device in b.devices]
