"""CUDA C++ kernels compiled by NVRTC and launched through the driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

try:  # cuda-bindings loads the NVRTC of its own major version, whose code needs a driver for that version
    from cuda.bindings import nvrtc

    if torch.version.cuda and nvrtc.nvrtcVersion()[1] > int(torch.version.cuda.partition(".")[0]):
        nvrtc = None
except (ImportError, RuntimeError):
    nvrtc = None

TensorMap = ctypes.c_uint64 * 16  # CUtensorMap


def _cubin(source: str, options: Sequence[str]) -> bytes:
    program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])[1]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0].value
    what = "ProgramLog" if failed else "CUBIN"
    found = b" " * getattr(nvrtc, f"nvrtcGet{what}Size")(program)[1]
    getattr(nvrtc, f"nvrtcGet{what}")(program, found)
    if failed:
        raise RuntimeError(found.decode(errors="replace"))
    return found


def driver(function: str, *args: Any) -> None:
    if status := getattr(ctypes.CDLL("libcuda.so.1"), function)(*args):
        raise RuntimeError(f"{function} failed with {status}")


@lru_cache(maxsize=1 << 14)
def tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> Any:
    """Map a matrix of 16-bit numbers: boxes of 64 columns, 128-byte swizzle, zeros past its ends."""
    memory, word = ctypes.create_string_buffer(256), ctypes.c_uint32
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)  # the driver needs 64 bytes
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(2 * stride)
    which = [ctypes.byref(made), 1, 2, ctypes.c_void_p(address), sizes, strides]  # 1: uint16
    # no interleave, 128-byte swizzle, 256-byte L2 promotion, no NaN fill
    driver("cuTensorMapEncodeTiled", *which, (word * 2)(64, box_rows), (word * 2)(1, 1), 0, 3, 3, 0)
    return made


@lru_cache(maxsize=1 << 14)
def tensor_map_of(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    memory, (words, longs) = (
        ctypes.create_string_buffer(256),
        (t * len(box) for t in (ctypes.c_uint32, ctypes.c_uint64)),
    )
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)  # the driver needs 64 bytes
    counts = longs(*sizes), longs(*(2 * s for s in strides)), words(*box), words(*(1 for _ in box))
    # 1: uint16; no interleave, 128-byte swizzle, 256-byte L2 promotion, no NaN fill
    driver("cuTensorMapEncodeTiled", made, 1, len(box), ctypes.c_void_p(address), *counts, 0, 3, 3, 0)
    return made


class Kernel:  # of a source on one Hopper; types: the ctypes of its parameters
    def __init__(
        self, source: str, name: str, options: Sequence[str], device: int, types: Sequence[Any], shared: int
    ) -> None:
        self.function, self.types, self.shared = ctypes.c_void_p(), types, shared
        module, code = ctypes.c_void_p(), _cubin(source, ("--gpu-architecture=sm_90a", *options))
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # creates the device's context
            driver("cuModuleLoadData", ctypes.byref(module), code)
            driver("cuModuleGetFunction", ctypes.byref(self.function), module, name.encode())
            driver("cuFuncSetAttribute", self.function, 8, shared)  # the most dynamic shared memory

    def launch(self, grid: int, block: int, stream: int, args: Sequence[Any], overlap: bool = False) -> None:
        values = [a if isinstance(a, t) else t(a) for t, a in zip(self.types, args, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        # CUlaunchConfig with one attribute: programmatic stream serialization
        early = ctypes.create_string_buffer(struct.pack("I4xI60x", 6, 1))
        sizes = [grid, 1, 1, block, 1, 1, self.shared, stream, ctypes.addressof(early), overlap]
        config = struct.pack("7I4xQQI4x", *sizes)
        driver("cuLaunchKernelEx", config, self.function, pointers, None)


class Prepared:
    """A launch whose parameters are in memory already, of which `at` may change."""

    def __init__(self, kernel: Kernel, grid: int, block: int, args: Sequence[Any]) -> None:
        self.kernel, self.grid, self.block, self.args = kernel, grid, block, list(args)

    def launch(self, stream: int, overlap: bool = False, at: int = -1, pointer: int | None = None) -> None:
        args = [pointer if i == at else a for i, a in enumerate(self.args)]
        self.kernel.launch(self.grid, self.block, stream, args, overlap)
