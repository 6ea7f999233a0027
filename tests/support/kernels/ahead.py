"""Compile the Triton kernels that a call launches for another chip, without a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import fastkernels
from fastkernels.overrides.kit import overlap

TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8", "bool": "i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _Driver:
    """As much of a driver as the launches of our kernels read."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Note the launches of Triton kernels in this context instead of making them."""
    found: list[Launch] = []
    run, active, quick = JITFunction.run, triton.runtime.driver._active, overlap._quick

    def note(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        found.append((self, args, kwargs))

    JITFunction.run = note
    triton.runtime.driver._active = _Driver()
    overlap._quick = False  # its launches need a compiled kernel
    try:
        yield found
    finally:
        JITFunction.run, triton.runtime.driver._active, overlap._quick = run, active, quick


def launched(call: Callable[[], Any]) -> list[Launch]:
    """The first launch of each kernel of a call, which may fail on results that no kernel wrote."""
    with launches() as found:
        try:
            call()
        except Exception:
            if not found:
                raise
    return list({name_of(launch): launch for launch in reversed(found)}.values())


def name_of(launch: Launch) -> str:
    """MODULE:KERNEL, of a module of our package."""
    fn = launch[0].fn
    return f"{fn.__module__.removeprefix('fastkernels.')}:{fn.__name__}"


def kernels() -> dict[str, bool]:
    """All functions under `triton.jit` of our package by name, and whether other ones of them call it."""
    root, found, called = Path(fastkernels.__file__).parent, list[str](), set[str]()
    for file in sorted(root.rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                found.append(f"{module}:{node.name}")
                calls = (c.func for c in ast.walk(node) if isinstance(c, ast.Call))
                called |= {
                    f.id if isinstance(f, ast.Name) else f.attr
                    for f in calls
                    if isinstance(f, (ast.Name, ast.Attribute))
                }
    return {name: name.rpartition(":")[2] in called for name in found}


def compile_for(launch: Launch, capability: int) -> Any:
    """A launch's kernel, compiled to machine code. Raises triton's errors."""
    kernel, args, kwargs = launch
    names = [p.name for p in kernel.params]
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature, constants, attributes = {}, {}, {}
    for i, p in enumerate(kernel.params):
        value = given.get(p.name, p.default if p.has_default else None)
        one = type(value) is int and value == 1 and not p.do_not_specialize  # as Triton specializes it
        if p.is_constexpr or value is None or isinstance(value, torch.dtype) or one:
            signature[p.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[p.name] = f"*{TYPES[str(value.dtype).removeprefix('torch.')]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[p.name] = "i1"
        elif isinstance(value, int):
            signature[p.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if not p.do_not_specialize and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32"
    options = {k: v for k, v in kwargs.items() if k in OPTIONS}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def usage(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers (REG) and bytes of spills (STACK) of each thread. folder: for the code."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "-res-usage", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", said)}
