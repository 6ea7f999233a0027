"""GPU memory shared between processes: legacy CUDA IPC handles through the driver, without files or counters."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


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


class Allocation:
    """`bytes`: device memory with a handle of its own; torch's allocator would share its block with other tensors."""

    def __init__(self, nbytes: int):
        self._pointer = ctypes.c_uint64()
        torch.zeros(1, device="cuda")  # creates the context
        torch.cuda.empty_cache()
        _check(_driver().cuMemAlloc_v2(ctypes.byref(self._pointer), ctypes.c_size_t(nbytes)), "cuMemAlloc")
        self.bytes = torch.as_tensor(_Array(self._pointer.value, nbytes), device="cuda")
        self.bytes.zero_()

    def close(self) -> None:
        """Free it; `bytes` must not be used afterwards."""
        torch.cuda.synchronize()
        _check(_driver().cuMemFree_v2(self._pointer), "cuMemFree")


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
