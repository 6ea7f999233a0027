"""`fk-bench doctor`: a verdict; with --all the versions, the seam of each op in each host, and what is off and why.

Doctor imports no host: it reads versions from package metadata and classes from source files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fastkernels.core import cuda_rtc, registry
from fastkernels.core.dispatch import installed
from fastkernels.core.env import Environment
from fastkernels.core.spec import OpSpec, Target
from fk_bench.core import machine
from fk_bench.core.checkout import REPO_ROOT
from fk_bench.core.terminal.flags import ConfigError, per_lane
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.info import verdict

HOSTS = ("vllm", "sglang", "transformers", "diffusers", "timm")
PLUGIN = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
HOST_ENVIRONMENTS = {"vllm": ".venv-vllm", "sglang": ".venv-sglang"}  # made by `make setup`

_LOCATE = """
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
print(list(found.submodule_search_locations)[0] if found and found.submodule_search_locations else "")
"""


# Libraries without wheels: (name, an op and its provider that load it, how to build it)
BUILT = (
    (
        "flash-attn", "attention_prefill", "fa3",
        "Needs nvcc: pip install 'fastkernels[flash-attn]' --no-build-isolation. FlashAttention-3, for Hopper, is built"
        " in the folder hopper/ of https://github.com/Dao-AILab/flash-attention: python setup.py install.",
    ),
    (
        "deep-gemm", "linear_fp8", "deepgemm",
        "Needs nvcc and a Hopper or newer GPU: pip install 'fastkernels[deep-gemm]' --no-build-isolation, or"
        " ./install.sh in https://github.com/deepseek-ai/DeepGEMM.",
    ),
)  # fmt: skip


@dataclass
class Found:
    """The report of doctor. Any of `problems` makes the exit status 1; `notes` do not."""

    rows: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Installed:
    """A host in a Python environment; `source` is the folder that holds its package."""

    host: str
    version: str
    python: str
    source: Path
    plugins: tuple[str, ...]


def machine_row() -> dict[str, Any]:
    """CPU, cores, memory in GiB, GPUs and driver."""
    base = machine.machine()
    row: dict[str, Any] = {
        "cpu": base.cpu,
        "cores": base.cores,
        "memory_gib": _memory(),
        "gpus": list(machine.gpu_names()),
    }
    row["driver"] = _driver() if row["gpus"] else None
    return row


def _memory() -> float | None:
    """Memory that this process may use, in GiB: the machine's, or the limit of its control group if that is lower."""
    sizes = []
    try:
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or 'max'
        pass
    return round(min(sizes) / 2**30, 1) if sizes else None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip().partition("\n")[0] or None


def interpreters(given: list[str]) -> dict[str, str]:
    """{name: interpreter}: this one, those given as LANE=PATH, and the hosts' environments of `make setup`."""
    found = {"this": sys.executable, **per_lane("--python", given)}
    for folder in (Path.cwd(), REPO_ROOT):
        for host, name in HOST_ENVIRONMENTS.items():
            python = folder / name / "bin" / "python"
            if host not in found and python.is_file():
                found[host] = str(python)
    return found


def installed_hosts(pythons: dict[str, str], found: Found) -> Iterator[Installed]:
    """The hosts in each environment. An interpreter that does not run is a problem."""
    for name, python in pythons.items():
        try:
            there = machine.interpreter(python)
        except ValueError as error:
            found.problems.append(f"--python {name}: {error}")
            continue
        hosts = [h for h in HOSTS if h in there.versions and (name == "this" or h in PLUGIN)]
        if name in HOST_ENVIRONMENTS and name not in hosts:
            found.problems.append(f"{name} is not installed in {python}")
        for host in hosts:
            out = subprocess.run(
                [python, "-c", _LOCATE, host], capture_output=True, text=True, timeout=120, cwd="/"
            )
            if not out.stdout.strip():
                found.problems.append(
                    f"{host} {there.versions[host]} is in the metadata of {python}, but its package is missing"
                )
                continue
            source = Path(out.stdout.strip().splitlines()[-1]).parent
            yield Installed(host, there.versions[host], python, source, there.plugins)
            if host in PLUGIN and PLUGIN[host] not in there.plugins:
                install = f"{python} -m pip install fastkernels"
                found.notes.append(f"{host} in {python} cannot load FastKernels. Install it there: {install}")


def seam_rows(installed: Installed, specs: list[OpSpec], env: Environment) -> Iterator[dict[str, Any]]:
    """Rows {op, host, version, class, seam, state, reason}; states: 'on', 'asked' (only if named in ops=), 'off'."""
    from fk_integrations.signatures.recorder import Sources

    sources = Sources(installed.source)
    for spec in specs:
        for target in spec.targets_for(installed.host, installed.version):
            state, reason = _state(spec, target, installed, sources, env)
            cls = target.path.partition(":")[2]
            yield {"op": spec.name, "host": installed.host, "version": installed.version, "class": cls,
                   "seam": target.seam, "state": state, "reason": reason}  # fmt: skip


def _state(
    spec: OpSpec, target: Target, installed: Installed, sources: Any, env: Environment
) -> tuple[str, str]:
    from fk_integrations.core.versions import unknown_source
    from fk_integrations.signatures.recorder import describe

    if spec.name in env.disable:
        return "off", "FASTKERNELS_DISABLE"
    if target.seam == "standalone":
        return "off", target.note or "for forks and our engine only"
    if env.ops is not None and spec.name not in env.ops:
        return "off", "not in FASTKERNELS_OPS"
    there = describe(sources, target.path)
    if there is None:
        return "off", f"{installed.host} {installed.version} has no {target.path}"
    reason = unknown_source(installed.host, installed.version, target.path, there["fingerprint"])
    if reason:
        return "off", reason
    if not target.default and env.ops is None:
        return "asked", target.note or f"only if requested: ops=[{spec.name!r}]"
    return "on", target.note


def provider_rows(specs: list[OpSpec], found: Found) -> list[dict[str, Any]]:
    """Rows {op, device, provider, there, reason} in order of preference, for the device types of this machine."""
    rows = []
    for spec in specs:
        op, name = spec.op, spec.name
        if op is None:
            continue
        for device in ("cuda", "cpu") if machine.gpu_names() else ("cpu",):
            try:
                order = op.order(device)
            except ValueError as error:  # FASTKERNELS_PROVIDER names an unknown provider
                found.problems.append(str(error))
                break
            rows += [
                {
                    "op": name,
                    "device": device,
                    "provider": p.name,
                    "there": reason is None,
                    "reason": reason or "",
                }
                for p, reason in order
            ]
    return rows


def library_rows() -> list[dict[str, Any]]:
    """Rows {library, there, module, build} of the libraries that have no wheels.

    The provider's modules are in order of preference. A host's own copy counts: the provider uses it.
    """
    rows = []
    for library, op, provider, build in BUILT:
        wanted = next(p.module for p in registry.get(op).op.providers if p.name == provider)
        names = (wanted,) if isinstance(wanted, str) else wanted
        module = next(filter(installed, names), None)
        copies = [n.partition(".")[0] for n in names if n.partition(".")[0] in HOSTS]
        note = f"With {' or '.join(copies)} installed, its own copy is used. " if copies else ""
        rows.append(
            {"library": library, "there": module is not None, "module": module, "build": note + build}
        )
    return rows


def cuda_row() -> dict[str, Any]:
    """The compiler of our CUDA C++ kernels, and the CUDA versions of PyTorch and of the driver."""
    reason = cuda_rtc.unavailable()
    return {
        "nvrtc": None if reason else cuda_rtc.nvrtc_version(),
        "torch_cuda": cuda_rtc.torch_cuda(),
        "driver_cuda": cuda_rtc.driver_cuda(),
        "reason": reason or "",
    }


def _environment(found: Found) -> Environment:
    try:
        return Environment.read()
    except ValueError as error:
        found.problems.append(str(error))
        return Environment()


def _specs(found: Found) -> Iterator[OpSpec]:
    for name in registry.op_names():
        try:
            yield registry.get(name)
        except Exception as error:  # report the other ops whatever it is
            found.problems.append(f"op {name} does not import: {type(error).__name__}: {error}")


def examine(python: list[str]) -> Found:
    """The whole report. Raises ConfigError for a --python that is not LANE=PATH."""
    found = Found()
    pythons = interpreters(python)
    env = _environment(found)
    specs = list(_specs(found))
    hosts = list(installed_hosts(pythons, found))
    names = sorted(k for k in os.environ if k.partition("_")[0] == "FASTKERNELS" or k == "TRITON_INTERPRET")
    found.rows = {
        "machine": machine_row(),
        "versions": {n: machine.interpreter(p).versions for n, p in pythons.items() if _runs(p)},
        "hosts": [{"host": h.host, "version": h.version, "python": h.python} for h in hosts],
        "seams": [row for h in hosts for row in seam_rows(h, specs, env)],
        "providers": provider_rows(specs, found),
        "libraries": library_rows(),
        "cuda": cuda_row(),
        "environment": {name: os.environ[name] for name in names},
    }
    return found


def _runs(python: str) -> bool:
    try:
        machine.interpreter(python)
    except ValueError:
        return False
    return True


def _show(found: Found) -> None:
    rows = found.rows
    if rows:
        table("Machine", ["", ""], [[k, v or "none"] for k, v in rows["machine"].items()])
        versions = [[k, *(f"{n} {v}" for n, v in vs.items())] for k, vs in rows["versions"].items()]
        table("Versions", ["environment", ""], [[name, ", ".join(rest)] for name, *rest in versions])
        table("Hosts", ["host", "version", "python"], [list(h.values()) for h in rows["hosts"]])
        sections = (
            ("Ops in the hosts", "seams"), ("Providers, in order", "providers"),
            ("Libraries without wheels", "libraries"),
        )  # fmt: skip
        for title, key in sections:
            columns = list(rows[key][0]) if rows[key] else []
            table(title, columns, [list(row.values()) for row in rows[key]])
        table("Environment variables", ["variable", "value"], list(rows["environment"].items()))
    for note in found.notes:
        print(f"note: {note}")


def doctor_command(
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="LANE=PATH", help="another interpreter to examine; repeatable"),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="also every op in every host, every provider, and how to build a library"),
    ] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the whole report, as a line of JSON")
    ] = False,
) -> None:
    """Show what works here and what does not: the machine, hosts, ops that will be replaced, providers, problems.

    The exit status is 1 if something is broken: an interpreter that does not run, an invalid variable.
    """
    try:
        found = examine(python or [])
    except ConfigError as error:
        fail(str(error))
    if not json_only:
        if everything:
            _show(found)
        print("\n".join(verdict.lines(found.rows, found.problems, found.notes, everything)))
    last_line({
        "command": "doctor", "ok": not found.problems, **(found.rows if json_only else {}), "notes": found.notes,
        "problems": found.problems,
    })  # fmt: skip
    if found.problems:
        raise SystemExit(1)
