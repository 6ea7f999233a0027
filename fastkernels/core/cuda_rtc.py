"""Compile CUDA C++ kernels with NVRTC, cache the machine code in a folder, and launch it through the driver.

Needs no nvcc. NVRTC comes with torch's CUDA wheels and is called through ctypes, since cuda-bindings loads the NVRTC of
its own major version only; it calls the driver. Imports and compiles on first use. The first call loads code, so it
must not be inside the capture of a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastkernels.core import compile_cache

log = logging.getLogger("fastkernels")


# Of this process: cubins loaded from the folder and compiled, and seconds of the compiler
counts = {"cached": 0, "compiled": 0, "compile_s": 0.0}
_LOCKS: dict[str, threading.Lock] = {}


class CompileError(RuntimeError):
    """NVRTC rejected a kernel; the message is its log."""


MAJORS = (13, 12)  # of NVRTC, with which all kernels compile


@lru_cache
def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built for, such as '12.8'; None for a CPU build."""
    import torch

    return torch.version.cuda


@lru_cache
def driver_cuda() -> str | None:
    """The newest CUDA version that the driver supports, such as '12.8'; None without a driver."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def usable_majors() -> list[int]:
    """The majors of NVRTC whose code the driver loads: PyTorch's own first, then the newest."""
    built, driver = torch_cuda(), driver_cuda()
    known = [major for major in MAJORS if driver is None or major <= _major(driver)]
    return sorted(known, key=lambda major: built is None or major != _major(built))


def _remedy() -> str:
    """The command that installs what our CUDA C++ kernels need."""
    majors = usable_majors()
    if not majors:
        return "update the driver"
    return f"pip install 'fastkernels[{'gpu-cu12' if majors[0] == 12 else 'gpu'}]'"


@lru_cache
def unavailable() -> str | None:
    """Return why no CUDA C++ kernel can be compiled here; None if one can."""
    try:
        nvrtc_version()
        _check_bindings()
    except Exception as error:  # of an import, of the library's loading, or of NVRTC
        said = str(error).splitlines()[0] if str(error) else ""
        return (
            f"NVRTC cannot be used ({type(error).__name__}: {said}); CUDA C++ kernels are off and others run instead:"
            f" {_remedy()}"
        )
    return None


def _check_bindings() -> None:
    """Raise ImportError without cuda-bindings, and for a version that the driver is too old for."""
    import cuda.bindings
    from cuda.bindings import driver  # noqa: F401

    found, supported = cuda.bindings.__version__, driver_cuda()
    if supported is not None and _major(found) > _major(supported):
        raise ImportError(
            f"cuda-bindings {found} needs a driver for CUDA {_major(found)}, and this one is for {supported}"
        )


@lru_cache
def _nvrtc(major: int | None = None) -> ctypes.CDLL:
    """NVRTC's library: of this major version, else the first of usable_majors() that is installed. Raises OSError."""
    wanted = [major] if major else usable_majors()
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for number in wanted:
        name = f"libnvrtc.so.{number}"
        folders = [root / part / "lib" for root in roots for part in (f"cu{number}", "cuda_nvrtc")]
        places = [
            str(folder / name) for folder in (*folders, Path(toolkit) / "lib64") if (folder / name).is_file()
        ]
        for place in (*places, name):  # the name alone: in the loader's own folders
            with contextlib.suppress(OSError):
                return ctypes.CDLL(place)
    if not wanted:
        raise OSError(
            f"it needs a driver for CUDA {MAJORS[-1]} or newer, and this one is for {driver_cuda()}"
        )
    raise OSError(f"{' or '.join(f'libnvrtc.so.{number}' for number in wanted)} is not installed")


@lru_cache
def nvrtc_version(major: int | None = None) -> str:
    """NVRTC's version, such as '13.0'. Raises OSError if none is installed."""
    library, numbers = _nvrtc(major), (ctypes.c_int(), ctypes.c_int())
    _nvrtc_check(library, library.nvrtcVersion(*map(ctypes.byref, numbers)))
    return "{}.{}".format(*(number.value for number in numbers))


def _nvrtc_check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(library.nvrtcGetErrorString(status).decode())


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values after the status of a driver's function. Raises RuntimeError with the status's name."""
    if result[0].value:
        raise RuntimeError(f"{type(result[0]).__name__}: {result[0].name}")
    return result[1:]


def nvrtc_compile(
    source: str,
    options: Sequence[str],
    hear: Callable[[str], object] | None = None,
    major: int | None = None,
) -> bytes:
    """The cubin of a source for the --gpu-architecture=sm_.. among the options. Raises CompileError.

    hear: called with what the compiler said.
    major: of the NVRTC that compiles; by default the one that nvrtc_version() names
    """
    library, program = _nvrtc(major), ctypes.c_void_p()
    told = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        _nvrtc_check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        memory = ctypes.create_string_buffer(size.value)
        _nvrtc_check(library, getattr(library, f"nvrtcGet{what}")(program, memory))
        return memory.raw

    _nvrtc_check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None),
    )
    try:
        status = library.nvrtcCompileProgram(program, len(options), told)
        said = read("ProgramLog").rstrip(b"\0 \n").decode(errors="replace") if status or hear else ""
        if hear:
            hear(said)
        if status:
            raise CompileError(f"NVRTC {nvrtc_version(major)}, {' '.join(options)}: {said}")
        return read("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cubin(
    source: str,
    options: Sequence[str],
    compiler: Callable[[str, Sequence[str]], bytes] = nvrtc_compile,
    version: Callable[[], str] = nvrtc_version,
) -> bytes:
    """Return the machine code of a source, from the cache folder (compile_cache.py) if it is there.

    The key covers source, options (with the architecture) and NVRTC's version. Processes may run this concurrently:
    each writes a file of its own and renames it. Without a writable folder every process compiles.
    """
    key = hashlib.sha256("\0".join((version(), *options, source)).encode()).hexdigest()[:32]
    if (found := _kept(compile_cache.requested_folder("nvrtc"), key)) is not None:
        return found
    folder = compile_cache.folder("nvrtc")
    with _LOCKS.setdefault(key, threading.Lock()):  # of threads with the same kernel, one compiles it
        if folder is not None and (found := _kept(folder, key)) is not None:
            return found
        start = time.monotonic()
        code = compiler(source, options)
        counts["compiled"] += 1
        counts["compile_s"] += time.monotonic() - start
        if folder is not None:
            _keep(code, folder / f"{key}.cubin")
    return code


def _kept(folder: Path, key: str) -> bytes | None:
    try:
        code = (folder / f"{key}.cubin").read_bytes()
    except OSError:
        return None
    if code[:4] != b"\x7fELF":
        return None
    counts["cached"] += 1
    return code


def _keep(code: bytes, path: Path) -> None:
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(name, path)
    except OSError as error:
        log.warning(
            "a compiled kernel was not cached, and the next process compiles it again: %s: %s", path, error
        )
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


class TensorMap(ctypes.Structure):
    """A tensor map of the driver (CUtensorMap): a kernel parameter that describes how to read tiles of a matrix."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def tensor_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> TensorMap:
    """Describe a matrix of 16-bit numbers: boxes of 64 columns, 128-byte swizzle, zeros past its ends.

    address    of the first number, a multiple of 16
    stride     numbers from one row to the next, a multiple of 8, no less than columns
    box_rows   1 to 256

    Raises RuntimeError.
    """
    return tensor_map_of(address, (columns, rows), (stride,), (64, box_rows))


@lru_cache(maxsize=1 << 14)
def tensor_map_of(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """Describe a tensor of up to five dimensions, the innermost first, as `tensor_map` does a matrix.

    strides  numbers from one index of the second dimension to the next, and so on

    The map holds only these values, so a cached one is never out of date. Raises RuntimeError.
    """
    from cuda.bindings import driver

    # Not through cuda-bindings 13.0: its object is not aligned to 64 bytes, which the driver requires.
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 128)
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 128)
    rank, u32, u64 = len(sizes), ctypes.c_uint32 * len(sizes), ctypes.c_uint64 * len(sizes)
    status = _encode()(
        ctypes.byref(made), int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16), rank, address,
        u64(*sizes), u64(*(2 * s for s in strides)), u32(*box), u32(*(1 for _ in sizes)),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: {driver.CUresult(status).name} for {sizes} at {address:#x}, {strides} apart,"
            f" boxes of {box}"
        )
    return made


@lru_cache
def _encode() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = (
        pointer, number, number, pointer, pointer, pointer, pointer, pointer, number, number, number, number,
    )  # fmt: skip
    function.restype = ctypes.c_int
    return function


class Kernel:
    """A kernel of a source on one device.

    types        ctypes of the kernel's parameters, in order
    shared       bytes of dynamic shared memory
    """

    def __init__(
        self, source: str, name: str, options: Sequence[str], device: int, types: Sequence[Any], shared: int
    ) -> None:
        import torch
        from cuda.bindings import driver

        self.driver, self.types, self.shared = driver, tuple(types), shared
        self.configs: dict[tuple[int, int, int, bool], Any] = {}
        self.active: dict[tuple[int, int], int] = {}
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes the device's context, if nothing has
            major, minor = torch.cuda.get_device_capability(device)
            target = f"--gpu-architecture=sm_{major}{minor}{'a' if major >= 9 else ''}"
            code = cubin(source, (target, *options))
            (self.module,) = _checked(driver.cuModuleLoadData(code))
            (self.function,) = _checked(driver.cuModuleGetFunction(self.module, name.encode()))
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self.function, limit, shared))

    def launch(self, grid: int, block: int, stream: int, args: Sequence[Any], overlap: bool = False) -> None:
        """Launch `grid` blocks on the stream; with `overlap`, before the previous kernel ends (griddepcontrol.wait)."""
        Prepared(self, grid, block, args).launch(stream, overlap)

    def clusters(self, blocks: int, threads: int) -> int:
        """Return how many clusters of so many blocks the device runs at once."""
        if (blocks, threads) not in self.active:
            config, attribute = self._config(blocks, threads, 0, False), self.driver.CUlaunchAttribute()
            attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = attribute.value.clusterDim
            dim.x, dim.y, dim.z = blocks, 1, 1
            config.attrs, config.numAttrs = [attribute], 1
            (found,) = _checked(self.driver.cuOccupancyMaxActiveClusters(self.function, config))
            self.active[blocks, threads] = max(int(found), 1)
        return self.active[blocks, threads]

    def config(self, grid: int, block: int, stream: int, overlap: bool) -> Any:
        """Return the launch's configuration: making one costs more than a launch."""
        key = (grid, block, stream, overlap)
        config = self.configs.get(key)
        if config is None:
            config = self.configs[key] = self._config(*key)
        return config

    def _config(self, grid: int, block: int, stream: int, overlap: bool) -> Any:
        driver = self.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.hStream, config.numAttrs = self.shared, stream, 0
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config


class Prepared:
    """A launch of a kernel whose parameters are in memory already: repeated calls change few or none of them."""

    def __init__(self, kernel: Kernel, grid: int, block: int, args: Sequence[Any]) -> None:
        self.kernel, self.grid, self.block, self.lock = kernel, grid, block, threading.Lock()
        self.values = [a if isinstance(a, t) else t(a) for t, a in zip(kernel.types, args, strict=True)]
        self.pointers = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))
        self.address = ctypes.addressof(self.pointers)

    def launch(self, stream: int, overlap: bool = False, at: int = -1, pointer: int | None = None) -> None:
        """Launch on the stream, as Kernel.launch does; first set the parameter `at`, a pointer, if there is one."""
        kernel = self.kernel
        config = kernel.config(self.grid, self.block, stream, overlap)
        with self.lock:  # the driver copies the parameters; another thread may set its own
            if at >= 0:
                self.values[at].value = pointer
            status = kernel.driver.cuLaunchKernelEx(config, kernel.function, self.address, 0)
        if status[0].value:
            _checked(status)
