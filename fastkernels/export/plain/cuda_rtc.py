"""CUDA C++ kernels compiled by NVRTC and launched through the driver (cuda-bindings)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if result[0].value:
        raise RuntimeError(f"{type(result[0]).__name__}: {result[0].name}")
    return result[1:]


def _cubin(source: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    (program,) = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    if status.value:
        text = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))[0]
        nvrtc.nvrtcGetProgramLog(program, text)
        raise RuntimeError(text.decode(errors="replace"))
    code = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))[0]
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    return code


TensorMap = ctypes.c_uint64 * 16  # CUtensorMap


@lru_cache(maxsize=1 << 14)
def tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> Any:
    """Map a matrix of 16-bit numbers: boxes of 64 columns, 128-byte swizzle, zeros past its ends."""
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 128)
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)  # the driver needs 64 bytes
    encode, word = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled, ctypes.c_uint32
    encode.argtypes = (ctypes.c_void_p, word, word, *[ctypes.c_void_p] * 5, *[word] * 4)
    dims, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(2 * stride)
    box, steps = (word * 2)(64, box_rows), (word * 2)(1, 1)
    # uint16, 2 dimensions; no interleave, 128-byte swizzle, 256-byte L2 promotion, no NaN fill
    status = encode(ctypes.byref(made), 1, 2, address, dims, strides, box, steps, 0, 3, 3, 0)
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status} for [{rows}, {columns}]")
    return made


class Kernel:
    """A kernel of a source on one device; `types` are the ctypes of its parameters."""

    def __init__(
        self, source: str, name: str, options: Sequence[str], device: int, types: Sequence[Any], shared: int
    ) -> None:
        from cuda.bindings import driver

        self.driver, self.types, self.shared = driver, tuple(types), shared
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # creates the device's context
            major, minor = torch.cuda.get_device_capability(device)
            target = f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}"
            (self.module,) = _checked(driver.cuModuleLoadData(_cubin(source, (target, *options))))
            (self.function,) = _checked(driver.cuModuleGetFunction(self.module, name.encode()))
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, limit, shared))

    def launch(self, grid: int, block: int, stream: int, args: Sequence[Any], overlap: bool = False) -> None:
        driver, config = self.driver, self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream, config.numAttrs = self.shared, stream, 0
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values = [a if isinstance(a, t) else t(a) for t, a in zip(self.types, args, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        _checked(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))
