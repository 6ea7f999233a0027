"""Packages of the Hugging Face `kernels` format: layers that replace the forward of a module, without a constructor.

A folder holds such packages, or is one: Python files below build/VARIANT/, with classes in a module `layers`. A variant
is the package itself, or holds it in a folder of its name.
"""

from __future__ import annotations

import ast
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fk_bench.evaluate.adapters.foreign_files import Adapted, Unadapted
from fk_bench.evaluate.adapters.loading import import_from, shown

LAYOUT = "hf_kernels"
# Layer: the op, and the attributes that the layer's forward reads, as arguments of the op
LAYERS: dict[str, tuple[str, dict[str, str]]] = {
    "RMSNorm": ("rms_norm", {"weight": "weight", "variance_epsilon": "eps"}),
    "LlamaRMSNorm": ("rms_norm", {"weight": "weight", "variance_epsilon": "eps"}),
    "LigerRMSNorm": ("rms_norm", {"weight": "weight", "variance_epsilon": "eps"}),
    "LayerNorm": ("layer_norm", {"weight": "weight", "bias": "bias", "variance_epsilon": "eps"}),
    "SiluAndMul": ("silu_and_mul", {}),
    "GeluAndMul": ("gelu_and_mul", {}),
    "QuickGELU": ("quick_gelu", {}),
}
# The value of an argument that a layer fixes; another one is not supported
FIXED = {"gelu_and_mul": {"approximate": "none"}}


def recognizes(folder: Path) -> bool:
    """Whether the folder is or holds packages with a folder build."""
    return bool(_packages(folder))


def _packages(folder: Path) -> list[Path]:
    return [p for p in (folder, *sorted(folder.iterdir())) if p.is_dir() and any(p.glob("build/*"))]


def _layers_of(package: Path) -> Path | None:
    """The module `layers` of the variant for this machine. Raises Unadapted if there is none."""
    variants = sorted(p for p in package.glob("build/*") if p.is_dir())
    ranked = [(rank, p) for p in variants if (rank := _rank(p.name)) is not None]
    if not ranked:
        names = ", ".join(p.name for p in variants[:3]) + (", ..." if len(variants) > 3 else "")
        raise Unadapted(f"has no build for {_here()}; it has {names}")
    variant = min(ranked)[1]
    files = (f for name in ("layers.py", "layers/__init__.py") for f in sorted(variant.rglob(name)))
    return next(files, None)


def _here() -> str:
    """The name of a variant for this machine: torch213-cu130-x86_64-linux."""
    major, minor = torch.__version__.split(".")[:2]
    backend = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
    return f"torch{major}{minor}-{backend}-{platform.machine()}-{platform.system().lower()}"


def _rank(variant: str) -> int | None:
    """0 for a variant that needs no build, 1 for one that does and fits, 2 for Python code of this machine's backend.

    3 for Python code of another backend; None for any other variant.
    """
    parts = [p for p in variant.split("-") if not p.startswith("cxx")]
    if parts[:1] == ["torch"]:
        backend = "cuda" if torch.version.cuda else "cpu"
        return ({"universal": 0, "cpu": 3, "cuda": 3} | {backend: 2}).get("-".join(parts[1:]))
    return 1 if "-".join(parts) == _here() else None


def adapted(folder: Path) -> Iterator[tuple[Path, Adapted | Unadapted]]:
    """Each layer of each package, with the op that it corresponds to, or why there is none."""
    for package in _packages(folder):
        try:
            file = _layers_of(package)
        except Unadapted as reason:
            yield package, reason
            continue
        if file is None:
            yield package, Unadapted("has no module `layers`")
            continue
        top = file.parent.parent if file.name == "__init__.py" else file.parent
        files = {f"layer_package/{f.relative_to(top)}": f for f in sorted(top.rglob("*")) if f.is_file()}
        name = f"layer_package/{file.relative_to(top)}"
        ordered = {name: file} | files
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for layer in _classes(file):
            if layer in LAYERS:
                yield file, Adapted(LAYERS[layer][0], ordered, {"module": module, "layer": layer})
            else:
                yield file, Unadapted(f"layer {layer} corresponds to no op")


def _classes(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    return [n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def bind(folder: Path, op: str, module: str, layer: str) -> Callable[..., Any]:
    """The op's function on the layer's forward. The author's code runs."""
    from fastkernels.core import registry

    cls = getattr(import_from(folder, module), layer)
    instance = cls.__new__(cls)
    nn.Module.__init__(instance)
    attributes = LAYERS[layer][1]
    spec = registry.get(op)
    names = [a.name for a in spec.arguments]
    passed = names[:1]

    def call(*given: Any) -> Any:
        values = dict(zip(names, (*given, *(spec.defaults[n] for n in names[len(given) :])), strict=True))
        fixed = {**spec.defaults, **FIXED.get(op, {})}
        for name in names:
            used = name in passed or name in attributes.values()
            if not used and values[name] is not fixed[name] and values[name] != fixed[name]:
                raise NotImplementedError(f"the layer has no {name} (here {shown(values[name])})")
        for attribute, name in attributes.items():
            instance.__dict__[attribute] = values[name]
        return instance(*(values[n] for n in passed))

    return call
