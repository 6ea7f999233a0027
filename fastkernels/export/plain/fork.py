"""Ops of a file for a fork: the kernel where it supports the call; elsewhere the caller runs the host's code."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("fastkernels", "FRAGMENT")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU


class Unsupported(RuntimeError): ...  # the kernel does not support the call


class ForOthers(str): ...  # the reason of a kernel that another one completes


def register(schema: str, fn: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define torch.ops.fastkernels.NAME, which torch.compile and CUDA graphs can call."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastkernels::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fastkernels, name).default


def guarded(schema: str, kernel: Any, fake: Any, supports: Any) -> Any:
    """Define the op of a kernel; the returned function raises Unsupported for calls that it does not support."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastkernels::{name}", fake, lib=LIBRARY)
    overload = getattr(torch.ops.fastkernels, name).default

    def call(*args: Any) -> Any:
        if not (args[0].is_cuda or INTERPRETED) or supports(*args) is not None:
            raise Unsupported
        return overload(*args)

    return call


functional = register
Op = Callable  # the type of the functions above


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
