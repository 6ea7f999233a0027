"""Memory that processes share through file descriptors, on a driver that is made of memfds."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import pytest
import torch
from fk_bench.kernels.judge.memory import ipc


class Driver:
    """The calls of the driver that Memory makes: handles are file descriptors; `live` has what is not yet freed."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.maps: dict[int, mmap.mmap] = {}

    def _count(self, what: str, by: int) -> int:
        self.live[what] = self.live.get(what, 0) + by
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        handle._obj.value = os.memfd_create("gpu")
        os.ftruncate(handle._obj.value, size.value)
        return self._count("handle", 1)

    def cuMemExportToShareableHandle(self, fd: Any, handle: Any, kind: Any, flags: Any) -> int:
        fd._obj.value = os.dup(handle.value)
        return 0

    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: Any) -> int:
        handle._obj.value = os.dup(fd.value)
        return self._count("handle", 1)

    def cuMemAddressReserve(self, pointer: Any, size: Any, alignment: Any, address: Any, flags: Any) -> int:
        pointer._obj.value = 1 << 40
        assert size.value % alignment.value == 0
        return self._count("address", 1)

    def cuMemMap(self, pointer: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        made = mmap.mmap(handle.value, size.value)
        pointer.value = ctypes.addressof(ctypes.c_char.from_buffer(made))
        self.maps[pointer.value] = made
        return self._count("map", 1)

    def cuMemSetAccess(self, *args: Any) -> int:
        return 0

    def cuMemUnmap(self, pointer: Any, size: Any) -> int:
        return self._count("map", -1)

    def cuMemRelease(self, handle: Any) -> int:
        os.close(handle.value)
        return self._count("handle", -1)

    def cuMemAddressFree(self, pointer: Any, size: Any) -> int:
        assert not self.live["map"] < 0
        return self._count("address", -1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(ipc, "_driver", lambda: found)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def as_tensor(array: Any, device: str) -> torch.Tensor:
        pointer, (size,) = array.__cuda_array_interface__["data"][0], array.__cuda_array_interface__["shape"]
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return found


def test_memory_is_shared_by_its_file_descriptor(driver: Driver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    own = ipc.Memory(ipc.PAGE + 1)
    other = ipc.Memory(ipc.PAGE + 1, os.dup(own.fd))
    assert own.bytes.nbytes == other.bytes.nbytes == ipc.PAGE + 1
    assert own.bytes.data_ptr() != other.bytes.data_ptr() and not other.bytes.any()
    own.bytes[-1] = 7
    assert other.bytes[-1] == 7 and other.fd == -1
    own.close()
    assert other.bytes[-1] == 7  # it lives as long as any process maps it
    other.close()
    opened = len(os.listdir("/proc/self/fd")) - len(
        driver.maps
    )  # an mmap object keeps a descriptor of its own
    assert set(driver.live.values()) == {0} and opened == before


def test_structures_are_those_of_the_driver() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    place = driver.CUmemLocation()
    place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 3
    theirs, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    theirs.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    theirs.location = access.location = place
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    mine = ipc._Location(ipc.DEVICE, 3)
    for wanted, made in (
        (theirs, ipc._Properties(ipc.PINNED, ipc.FILE_DESCRIPTOR, mine)), (access, ipc._Access(mine, ipc.READ_WRITE))
    ):  # fmt: skip
        assert ctypes.string_at(wanted.getPtr(), ctypes.sizeof(made)) == bytes(made)


@pytest.mark.gpu
def test_memory_is_shared_on_gpu() -> None:
    own = ipc.Memory(5_000_000)
    other = ipc.Memory(5_000_000, os.dup(own.fd))
    own.bytes[-3:] = 9
    assert other.bytes.sum().item() == 27
    own.close()
    assert other.bytes[-1].item() == 9
    other.close()
