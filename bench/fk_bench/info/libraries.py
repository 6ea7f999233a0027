"""The optional kernel libraries: which copy of each an environment has, and how to install it."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from fastkernels.core.dispatch import installed

COMPILED = "no wheel, compiled with nvcc: pip install --no-build-isolation"


@dataclass(frozen=True)
class Library:
    """One library.

    modules   importable names, in order of preference: a host's own copy, or the library itself
    purpose   what uses it
    install   how to install it where no host brings it
    """

    name: str
    modules: tuple[str, ...]
    purpose: str
    install: str


LIBRARIES = (
    Library("FlashInfer", ("flashinfer",), "providers and baselines `flashinfer`, attention_backend flashinfer",
            "pip install 'fastkernels[flashinfer]'"),
    Library("FlashAttention-3", ("vllm.vllm_flash_attn", "flash_attn_interface"), "provider and baseline `fa3`",
            f"{COMPILED} 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"),
    Library("FlashAttention-2", ("flash_attn",), "transformers models with attn_implementation flash_attention_2",
            f"{COMPILED} 'fastkernels[flash-attn]'"),
    Library("DeepGEMM", ("deep_gemm", "vllm.third_party.deep_gemm"), "providers and baselines `deepgemm`",
            f"{COMPILED} 'fastkernels[deep-gemm]'"),
    Library("SGLang's kernels", ("sgl_kernel",), "baselines `sglang`", "comes with SGLang on a GPU"),
    Library("NVRTC", ("cuda.bindings",), "our CUDA C++ kernels", "pip install 'fastkernels[gpu]'"),
)  # fmt: skip

_FIND = f"""
import json, sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
{inspect.getsource(installed)}
print(json.dumps([name for name in json.loads(sys.argv[1]) if installed(name)]))
"""


def library_rows(pythons: Mapping[str, str]) -> list[dict[str, str]]:
    """[{library, environment, copy, purpose, install}]: a row for each environment that has a copy, or one without."""
    names = [module for library in LIBRARIES for module in library.modules]
    there = {name: _installed(python, names) for name, python in pythons.items()}
    rows = []
    for library in LIBRARIES:
        copies = {name: next((m for m in library.modules if m in found), "") for name, found in there.items()}
        found = {name: copy for name, copy in copies.items() if copy}
        for name, copy in (found or {"": ""}).items():
            rows.append({"library": library.name, "environment": name, "copy": copy or "not installed",
                         "purpose": library.purpose, "install": "" if copy else library.install})  # fmt: skip
    return rows


def _installed(python: str, names: list[str]) -> set[str]:
    """The importable ones of these modules in another environment; nothing is imported there."""
    command = [python, "-c", _FIND, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    return set(json.loads(done.stdout)) if done.returncode == 0 else set()
