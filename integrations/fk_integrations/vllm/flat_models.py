"""vLLM's flat models (vllm/models/): their layers call norms, activations and rotations as functions.

A patch replaces modules, so it does not reach these calls. The report names them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from fastkernels.core.reasons import Kind, Reason

PACKAGE = "vllm.models."
# {op: parts of the names of functions that compute it}, where these differ from the op's name
NAMES = {
    "rotary_emb": ("rotary_emb", "_rope"), "quantize_fp8": ("quantize_fp8", "fp8_quant"),
    "rms_norm": ("rms_norm", "rmsnorm"),
}  # fmt: skip


def not_reached(op: str, model: Any) -> dict[Reason, int]:
    """{reason: 0} that names the functions of the op that a flat model calls itself; {} for other models."""
    modules = {type(m).__module__ for m in model.modules()} if model is not None else set()
    files = sorted(name for name in modules if name.startswith(PACKAGE))
    parts = NAMES.get(op, (op,))
    called = sorted({f for file in files for f in _called(file) if any(part in f for part in parts)})
    if not called:
        return {}
    model_name = ".".join(files[0].split(".")[:3])
    functions = ", ".join(f"{name}()" for name in called)
    text = f"a patch replaces modules, and the files of {model_name} also call {functions}"
    return {Reason(Kind.NO_OP, text): 0}


@cache
def _called(file: str) -> frozenset[str]:
    """Names of the functions, not methods of the instance, that a module of vLLM calls."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[file]))
    except OSError:
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if isinstance(node.func, ast.Name):
                found.add(node.func.id)
            elif isinstance(node.func, ast.Attribute) and not (
                isinstance(owner, ast.Name) and owner.id == "self"
            ):
                found.add(node.func.attr)
    return frozenset(name for name in found if not name[:1].isupper())
