"""GPU memory shared between processes, through the driver: by file descriptors, and a process's own by IPC handles."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

PAGE = 2 << 20  # bytes: the largest pages that the driver gives such memory
# Of CUmemLocationType, CUmemAllocationType, CUmemAllocationHandleType and CUmemAccess_flags
DEVICE, PINNED, FILE_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3
NO_FLAGS = ctypes.c_uint64(0)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        raise RuntimeError(f"{what}: {name.value.decode() if name.value else result}")


def driver_call(function: str, *args: Any) -> None:
    """Call a function of the CUDA driver. Raises RuntimeError with the name of its error."""
    _check(getattr(_driver(), function)(*args), function)


def share(t: torch.Tensor) -> dict[str, Any]:
    """{handle, offset, nbytes}: the allocation of a tensor and the tensor's place in it."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    pointer = ctypes.c_uint64(t.data_ptr())
    _check(
        _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer),
        "cuMemGetAddressRange",
    )
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base), "cuIpcGetMemHandle")
    return {"handle": bytes(handle).hex(), "offset": t.data_ptr() - base.value, "nbytes": t.nbytes}


class _Array:
    def __init__(self, pointer: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Memory:
    """`bytes`: device memory that any process with its file descriptor, `fd`, can map. Raises RuntimeError.

    nbytes  of memory that is zero; of that of another process, if it is given
    given   the file descriptor of another process's memory, which is closed

    Not by an IPC handle: what that maps may have pages of 64 KiB, and a kernel then waits for the GPU to translate
    addresses. linear_int4 took 40 us instead of 22 (28672 x 4096, 1 token, 6 GB of slots on an H100 of 2026-11-27).
    """

    def __init__(self, nbytes: int, given: int | None = None):
        torch.zeros(1, device="cuda")  # creates the context
        torch.cuda.empty_cache()
        size = ctypes.c_size_t(-(-nbytes // PAGE) * PAGE)
        place = _Location(DEVICE, torch.cuda.current_device())
        self._handle, self._pointer, self._size = ctypes.c_uint64(), ctypes.c_uint64(), size
        handle, pointer = ctypes.byref(self._handle), ctypes.byref(self._pointer)
        if given is None:
            properties = _Properties(PINNED, FILE_DESCRIPTOR, place)
            driver_call("cuMemCreate", handle, size, ctypes.byref(properties), NO_FLAGS)
            fd = ctypes.c_int()
            driver_call(
                "cuMemExportToShareableHandle", ctypes.byref(fd), self._handle, ctypes.c_int(FILE_DESCRIPTOR), NO_FLAGS
            )  # fmt: skip
            self.fd = fd.value
        else:
            kind = ctypes.c_int(FILE_DESCRIPTOR)
            driver_call("cuMemImportFromShareableHandle", handle, ctypes.c_void_p(given), kind)
            os.close(given)
            self.fd = -1
        driver_call("cuMemAddressReserve", pointer, size, ctypes.c_size_t(PAGE), ctypes.c_uint64(0), NO_FLAGS)
        driver_call("cuMemMap", self._pointer, size, ctypes.c_size_t(0), self._handle, NO_FLAGS)
        access = _Access(place, READ_WRITE)
        driver_call("cuMemSetAccess", self._pointer, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.bytes = torch.as_tensor(_Array(self._pointer.value, nbytes), device="cuda")
        if given is None:
            self.bytes.zero_()

    def close(self) -> None:
        """Unmap it; it is free once all processes have. `bytes` must not be used afterwards."""
        torch.cuda.synchronize()
        driver_call("cuMemUnmap", self._pointer, self._size)
        driver_call("cuMemRelease", self._handle)
        driver_call("cuMemAddressFree", self._pointer, self._size)
        if self.fd >= 0:
            os.close(self.fd)


class Mapping:
    """The allocations of another process that are open here; each is opened once, and closed by close()."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def bytes_at(self, shared: dict[str, Any]) -> torch.Tensor:
        """A uint8 tensor over memory that `share` described, valid until close().

        Raises RuntimeError for a handle that cannot be opened, and for a place outside its allocation.
        """
        handle = shared["handle"]
        if handle not in self._open:
            pointer = ctypes.c_uint64()
            raw = _Handle.from_buffer_copy(bytes.fromhex(handle))
            opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), raw, ctypes.c_uint(1))
            _check(opened, "cuIpcOpenMemHandle")
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
            _check(found, "cuMemGetAddressRange")
            self._open[handle], self._sizes[handle] = pointer.value, size.value
        if shared["offset"] + shared["nbytes"] > self._sizes[handle]:
            raise RuntimeError(f"{shared['nbytes']} bytes at {shared['offset']} of {self._sizes[handle]}")
        if not shared["nbytes"]:
            return torch.empty(0, dtype=torch.uint8, device="cuda")
        return torch.as_tensor(_Array(self._open[handle] + shared["offset"], shared["nbytes"]), device="cuda")

    def close(self) -> None:
        """Unmap everything. Tensors over this memory must not be used afterwards."""
        if self._open:
            torch.cuda.synchronize()
        for pointer in self._open.values():
            _driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer))
        self._open.clear()
