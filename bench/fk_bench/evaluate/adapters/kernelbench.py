"""KernelBench: files NUMBER_NAME.py whose class ModelNew replaces the problem's Model.

PROBLEMS lists the problems with the mathematics of an op here. A problem's constants are arguments of the op.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fk_bench.evaluate.adapters import published
from fk_bench.evaluate.adapters.foreign_files import Adapted, Unadapted, parsed
from fk_bench.evaluate.adapters.loading import import_from

LAYOUT = "kernelbench"
PROBLEMS = {
    "GELU_": "gelu", "MinGPTNewGelu": "gelu", "Batched_matrix_multiplication": "batched_matmul",
    "LayerNorm": "layer_norm", "GroupNorm_": "group_norm", "Max_Pooling_2D": "pool",
    "conv_standard_2D__square_input__square_kernel": "convolution",
}  # fmt: skip
_FILE = re.compile(r"\d+_(.+)")


def recognizes(folder: Path) -> bool:
    """Whether the folder has files NUMBER_NAME.py with a class ModelNew."""
    return any(_FILE.fullmatch(f.stem) and "ModelNew" in _classes(f) for f in folder.glob("*.py"))


def adapted(folder: Path) -> Iterator[tuple[Path, Adapted | Unadapted]]:
    """Each file, with the op that its problem corresponds to, or why there is none."""
    for file in sorted(folder.glob("*.py")):
        match = _FILE.fullmatch(file.stem)
        problem = match[1] if match else file.stem
        if "ModelNew" not in _classes(file):
            yield file, Unadapted("defines no class ModelNew")
        elif problem not in PROBLEMS:
            yield file, Unadapted(f"problem {problem} has the mathematics of no op")
        else:
            yield file, Adapted(PROBLEMS[problem], {"candidate.py": file}, {"problem": problem})


def _classes(file: Path) -> set[str]:
    try:
        tree = parsed(file)
    except Unadapted:
        return set()
    return {n.name for n in tree.body if isinstance(n, ast.ClassDef)}


def bind(folder: Path, op: str, problem: str) -> Callable[..., Any]:
    """The op's function on ModelNew. The author's code runs."""
    make = published.Modules(import_from(folder, "candidate").ModelNew)
    return FUNCTIONS[op](make, problem)


def _gelu(make: published.Modules, problem: str) -> Callable[..., Any]:
    kind = "tanh" if problem == "MinGPTNewGelu" else "none"

    def gelu(x, approximate="none"):
        published.refuse(approximate=approximate if approximate != kind else None)
        return make(x.device)(x)

    return gelu


def _affine(weight: Any, bias: Any, eps: float) -> None:
    """Raise NotImplementedError for a norm other than that of the problems."""
    if weight is None or bias is None or eps != 1e-5:
        has = (
            ", ".join(f"no {n}" for n, t in (("weight", weight), ("bias", bias)) if t is None)
            or f"eps {eps:g}"
        )
        raise NotImplementedError(f"ModelNew has a weight, a bias and an epsilon of 1e-5 (here {has})")


def _layer_norm(make: published.Modules, problem: str) -> Callable[..., Any]:
    def layer_norm(x, weight, bias, eps):
        _affine(weight, bias, eps)
        return published.give(make(x.device, (x.shape[-1],)), weight=weight, bias=bias)(x)

    return layer_norm


def _group_norm(make: published.Modules, problem: str) -> Callable[..., Any]:
    def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, silu=False, shift=None):
        published.refuse(silu=silu, shift=shift)
        _affine(weight, bias, eps)
        return published.give(make(x.device, x.shape[1], num_groups), weight=weight, bias=bias)(x)

    return group_norm


def _pool(make: published.Modules, problem: str) -> Callable[..., Any]:
    def pool(x, window, stride=(), padding=(0,), maximum=False, ceil_mode=False, count_include_pad=True):
        published.refuse(
            mean=not maximum, ceil_mode=ceil_mode, dimensions=None if x.dim() == 4 else x.dim() - 2
        )
        numbers = [set(v) for v in (window, stride or window, padding)]
        if any(len(n) != 1 for n in numbers):
            raise NotImplementedError(f"ModelNew has one window for both dimensions (here {tuple(window)})")
        return make(x.device, *(n.pop() for n in numbers), 1)(x)

    return pool


FUNCTIONS: dict[str, Callable[[published.Modules, str], Callable[..., Any]]] = {
    "gelu": _gelu, "layer_norm": _layer_norm, "group_norm": _group_norm, "pool": _pool,
    "batched_matmul": lambda make, problem: lambda a, b: make(a.device)(a, b),
    "convolution": lambda make, problem: published.FUNCTIONS["convolution"](make),
}  # fmt: skip
