"""Ops of an exported file: the kernel where it supports the call, else plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("fastkernels", "FRAGMENT")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU


class ForOthers(str): ...  # the reason of a kernel that another one completes


def register(schema: str, fn: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define torch.ops.fastkernels.NAME, which torch.compile and CUDA graphs can call."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastkernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastkernels, name).default


class Op:
    """torch.ops.fastkernels.NAME: `kernel` where `supports` gives no reason against the call, else `plain`."""

    requested = ""  # nothing is requested by name in an exported file

    def __init__(
        self, schema: str, fake: Callable[..., Any], kernel: Callable[..., Any], plain: Callable[..., Any],
        supports: Callable[..., str | None],
    ) -> None:  # fmt: skip
        self.kernel, self.plain, self.supports = kernel, plain, supports
        self.overload = register(schema, self.run, fake)

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def run(self, *args: Any) -> Any:
        return (self.kernel if self.faster(*args) else self.plain)(*args)

    def faster(self, *args: Any) -> bool:
        return (args[0].is_cuda or INTERPRETED) and self.supports(*args) is None

    def into(self, out: torch.Tensor, *args: Any) -> None:
        out.copy_(self.run(*args))


functional = register


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
