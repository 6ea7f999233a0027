"""Products of one x with several weights in one kernel of cuBLASLt: a batch, its stride the distance of the weights.

The weights stay where they are. The first call of a shape times the algorithms that cuBLASLt proposes on its own
tensors, and later calls run the fastest; where the first call is in the capture of a CUDA graph, it runs the first one.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
ALIGNED = 16  # bytes, of pointers and rows
WORKSPACE = 32 << 20  # bytes, PyTorch's on Hopper
PROPOSALS, ROUNDS = 16, 5
MARGIN = 0.99  # of the first proposal's time: another one has to be faster
FLUSH = 64 << 20  # bytes read before each timed call, more than an H100's L2 cache
_P = c_void_p
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "Create": (_P,),
    "MatmulDescCreate": (_P, c_int, c_int),
    "MatmulDescSetAttribute": (_P, c_int, _P, c_size_t),
    "MatrixLayoutCreate": (_P, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutSetAttribute": (_P, c_int, _P, c_size_t),
    "MatmulPreferenceCreate": (_P,),
    "MatmulPreferenceSetAttribute": (_P, c_int, _P, c_size_t),
    "MatmulAlgoGetHeuristic": (*[_P] * 7, c_int, _P, _P),
    "Matmul": (*[_P] * 14, c_size_t, _P),
}
# Attributes of a product's description, of a matrix and of a preference, and epilogues
_FP32, _COMPUTE_FP32 = 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS, _BIAS_STRIDE = 3, 7, 8, 10
_COUNT, _STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTION, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_PLAIN, _WITH_BIAS = 1, 4
_REDUCE_FP32 = 2  # the parts of a split sum are added in float32

Tensors = Sequence[torch.Tensor]


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@lru_cache
def _library() -> Any:
    """The library that PyTorch has loaded. Raises OSError."""
    found = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    for name, arguments in PROTOTYPES.items():
        getattr(found, f"cublasLt{name}").argtypes = arguments
    return found


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*args)
    if status:
        raise RuntimeError(f"cublasLt{name}: status {status}")


def _made(kind: str, *args: Any) -> c_void_p:
    made = c_void_p()
    _call(f"{kind}Create", byref(made), *args)
    return made


def _set(kind: str, target: c_void_p, attribute: int, value: Any) -> None:
    _call(f"{kind}SetAttribute", target, attribute, byref(value), ctypes.sizeof(value))


@lru_cache
def _handle(device: int) -> c_void_p:
    with torch.cuda.device(device):
        return _made("")


def _distance(tensors: Tensors) -> int | None:
    """The elements from each tensor to the next, the same between all; None if they differ or go backwards."""
    found = {b.data_ptr() - a.data_ptr() for a, b in pairwise(tensors)}
    bytes_ = found.pop()
    return None if found or bytes_ <= 0 or bytes_ % ALIGNED else bytes_ // tensors[0].element_size()


class _Plan:
    """Products of `count` weights [n, k] with x [m, k]: their description and the algorithm that they run."""

    def __init__(
        self,
        handle: c_void_p,
        count: int,
        m: int,
        n: int,
        k: int,
        dtype: int,
        x: int,
        weight: int,
        bias: bool,
    ):
        self.lock, self.handle, self.chosen, self.sizes = threading.Lock(), handle, False, (m, n)
        self.description = _made("MatmulDesc", _COMPUTE_FP32, _FP32)
        _set("MatmulDesc", self.description, _TRANSPOSE_A, c_int32(1))
        _set("MatmulDesc", self.description, _EPILOGUE, c_uint32(_WITH_BIAS if bias else _PLAIN))
        # cuBLASLt's matrices are stored by column: out^T [n, m] = (W^T)^T x^T, which are out, W and x by row
        sizes = (k, n, weight), (k, m, x), (n, m, n)
        self.layouts = [_made("MatrixLayout", dtype, *size) for size in sizes]
        for layout in self.layouts:
            _set("MatrixLayout", layout, _COUNT, c_int32(count))

    def place(self, weights: Tensors, biases: Tensors) -> None:
        """Tell where the weights and biases are."""
        for layout, stride in zip(
            self.layouts, (_distance(weights), 0, self.sizes[0] * self.sizes[1]), strict=True
        ):
            _set("MatrixLayout", layout, _STRIDE, c_int64(stride or 0))
        if biases:
            _set("MatmulDesc", self.description, _BIAS, c_void_p(biases[0].data_ptr()))
            _set("MatmulDesc", self.description, _BIAS_STRIDE, c_int64(_distance(biases) or 0))

    def propose(self) -> bool:
        preference = _made("MatmulPreference")
        _set("MatmulPreference", preference, _MAX_WORKSPACE, c_uint64(WORKSPACE))
        _set("MatmulPreference", preference, _REDUCTION, c_uint32(_REDUCE_FP32))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, c_uint32(ALIGNED))
        found, count = (_Proposal * PROPOSALS)(), c_int()
        matrices = (*self.layouts, self.layouts[2])
        given = (self.handle, self.description, *matrices, preference, PROPOSALS, byref(found), byref(count))
        if _library().cublasLtMatmulAlgoGetHeuristic(*given):
            return False
        self.proposals = [p for p in found[: count.value] if p.state == 0]
        return bool(self.proposals)

    def run(self, proposal: _Proposal, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        space = torch.empty(proposal.workspace, dtype=torch.uint8, device=out.device)
        of_weight, of_x, of_out = self.layouts
        _call(
            "Matmul", self.handle, self.description, byref(c_float(1.0)), weight.data_ptr(), of_weight, x.data_ptr(),
            of_x, byref(c_float(0.0)), out.data_ptr(), of_out, out.data_ptr(), of_out, byref(proposal.algorithm),
            space.data_ptr(), proposal.workspace, torch.cuda.current_stream(out.device).cuda_stream,
        )  # fmt: skip

    def choose(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Keep the fastest proposal."""
        other = torch.zeros(FLUSH // 4, device=out.device)
        events: dict[int, list[Any]] = {i: [] for i in range(len(self.proposals))}
        for _ in range(ROUNDS):
            for i, found in [*events.items()]:
                torch.sum(other), torch.sum(x)  # as between layers: only x is in the cache
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                try:
                    self.run(self.proposals[i], x, weight, out)
                except RuntimeError:
                    del events[i]
                    continue
                pair[1].record()
                found.append(pair)
        torch.cuda.current_stream(out.device).synchronize()
        times = {i: statistics.median(a.elapsed_time(b) for a, b in found) for i, found in events.items()}
        first, best = next(iter(times)), min(times, key=times.__getitem__)
        chosen = best if times[best] < MARGIN * times[first] else first
        self.proposals, self.chosen = [self.proposals[chosen]], True


_plans: dict[tuple[Any, ...], _Plan | None] = {}
_planning = threading.Lock()


@lru_cache
def _unavailable(device: int) -> str | None:
    """Why cuBLASLt cannot be called here, or None."""
    try:
        _handle(device)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"cuBLASLt cannot be called ({type(error).__name__}: {error})"
    return None


def _supported(x: torch.Tensor, weights: Tensors, biases: Tensors) -> bool:
    on_gpu = x.is_cuda and torch.version.cuda is not None and x.dtype in DTYPES
    # Which algorithm is the fastest one may differ between processes.
    if not on_gpu or torch.are_deterministic_algorithms_enabled() or 0 in (*x.shape, *weights[0].shape):
        return False
    for t in (x, *weights, *biases):
        rows = t.stride(0) if t.dim() == 2 else len(t)
        aligned = not t.data_ptr() % ALIGNED and not rows * t.element_size() % ALIGNED
        if t.dtype != x.dtype or t.stride(-1) != 1 or rows < t.shape[-1] or not aligned:
            return False
    return len({w.stride(0) for w in weights}) == 1 and _unavailable(x.device.index) is None


def batches(x: torch.Tensor, weights: Tensors, biases: Tensors) -> list[tuple[int, int]]:
    """Ranges of weights whose products with x are one kernel of `products` each; a range of one is the caller's.

    x: [M, K]; weights: [N, K] each; biases: [N] each, or empty.
    """
    every, ranges = len(weights), [(i, i + 1) for i in range(len(weights))]
    if every < 2 or not _supported(x, weights, biases):
        return ranges
    for size in range(every, 1, -1):
        for first in range(every - size, -1, -1):
            span = slice(first, first + size)
            if all(not t or _distance(t[span]) is not None for t in (weights, biases)):
                return [*ranges[:first], (first, first + size), *ranges[first + size :]]
    return ranges


def products(x: torch.Tensor, weights: Tensors, biases: Tensors, out: torch.Tensor) -> bool:
    """Write x W^T + b of each weight to out [count, M, N], which is contiguous. The weights are a range of `batches`.

    Returns False if cuBLASLt has no algorithm for this shape.
    """
    (count, m, n), k = out.shape, x.shape[1]
    of_x, of_weight = x.stride(0), weights[0].stride(0)
    key = (x.device.index, x.dtype, count, m, n, k, of_x, of_weight, not biases)
    with torch.cuda.device(x.device):
        with _planning:
            if key not in _plans:
                sizes = (count, m, n, k, DTYPES[x.dtype], of_x, of_weight)
                plan = _Plan(_handle(x.device.index), *sizes, bool(biases))
                plan.place(weights, biases)
                _plans[key] = plan if plan.propose() else None
            found = _plans[key]
        if found is None:
            return False
        with found.lock:
            found.place(weights, biases)
            if not found.chosen and not torch.cuda.is_current_stream_capturing():
                found.choose(x, weights[0], out)
            found.run(found.proposals[0], x, weights[0], out)
    return True
