"""Products in cuBLASLt itself: of one x with several weights in one kernel, and without a workspace.

Products of one x are a batch, its stride the distance of the weights, which stay where they are. Most large products
that PyTorch calls need 4 bytes of zeros: the memset before each takes 4 us in a CUDA graph, a kernel after a kernel
almost nothing. The first call of a shape times the algorithms that cuBLASLt proposes on its tensors, and later calls
run the fastest. A first call in the capture of a CUDA graph runs the first.
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
PROPOSALS, ROUNDS = 8, 5
MEMSET = 3e-3  # milliseconds that it takes more in a graph than in a stream
MARGIN = 1.01  # by which a product with it has to be faster
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
_PLAIN, _WITH_BIAS, _GELU = 1, 4, 32
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
    """Products of `count` weights [n, k] with x [m, k]: their description and the algorithm that they run.

    strides  of the rows of x, weight, what is added, and the result
    """

    def __init__(
        self, handle: c_void_p, count: int, sizes: tuple[int, int, int], dtype: int, strides: tuple[int, ...],
        bias: bool, gelu: bool, adds: bool,
    ):  # fmt: skip
        (m, n, k), (of_x, of_weight, of_added, of_out) = sizes, strides
        self.lock, self.handle, self.count, self.between = threading.Lock(), handle, count, m * n
        self.chosen, self.adds = False, adds
        self.description = _made("MatmulDesc", _COMPUTE_FP32, _FP32)
        _set("MatmulDesc", self.description, _TRANSPOSE_A, c_int32(1))
        epilogue = (_WITH_BIAS if bias else _PLAIN) + _GELU * gelu
        _set("MatmulDesc", self.description, _EPILOGUE, c_uint32(epilogue))
        # cuBLASLt's matrices are stored by column: out^T [n, m] = (W^T)^T x^T, which are out, W and x by row
        matrices = (k, n, of_weight), (k, m, of_x), (n, m, of_added), (n, m, of_out)
        self.layouts = [_made("MatrixLayout", dtype, *matrix) for matrix in matrices]
        for layout in self.layouts:
            _set("MatrixLayout", layout, _COUNT, c_int32(count))

    def place(self, weights: Tensors, biases: Tensors) -> None:
        """Tell where the weights and biases are."""
        if self.count > 1:
            strides = (_distance(weights) or 0, 0, self.between, self.between)
            for layout, stride in zip(self.layouts, strides, strict=True):
                _set("MatrixLayout", layout, _STRIDE, c_int64(stride))
        if biases:
            _set("MatmulDesc", self.description, _BIAS, c_void_p(biases[0].data_ptr()))
            if self.count > 1:
                _set("MatmulDesc", self.description, _BIAS_STRIDE, c_int64(_distance(biases) or 0))

    def propose(self) -> bool:
        """Read proposals without a workspace and with one; return whether there are others than PyTorch's own."""
        self.proposals = self._proposed(0)
        with_one = self._proposed(WORKSPACE)
        if self.count == 1:  # PyTorch runs the first
            with_one = with_one[:1]
            if not self.adds and (not with_one or not with_one[0].workspace):
                return False
        self.proposals += with_one
        return bool(self.proposals)

    def _proposed(self, workspace: int) -> list[_Proposal]:
        preference = _made("MatmulPreference")
        _set("MatmulPreference", preference, _MAX_WORKSPACE, c_uint64(workspace))
        _set("MatmulPreference", preference, _REDUCTION, c_uint32(_REDUCE_FP32))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, c_uint32(ALIGNED))
        found, count = (_Proposal * PROPOSALS)(), c_int()
        given = (self.handle, self.description, *self.layouts, preference, PROPOSALS, byref(found))
        status = _library().cublasLtMatmulAlgoGetHeuristic(*given, byref(count))
        known = () if status else found[: count.value]
        return [p for p in known if p.state == 0 and p.workspace <= workspace]

    def run(self, proposal: _Proposal, x: Any, weight: Any, added: Any, out: Any) -> None:
        space = torch.empty(proposal.workspace, dtype=torch.uint8, device=out.device)
        of_weight, of_x, of_added, of_out = self.layouts
        beta, c = (0.0, out) if added is None else (1.0, added)
        _call(
            "Matmul", self.handle, self.description, byref(c_float(1.0)), weight.data_ptr(), of_weight, x.data_ptr(),
            of_x, byref(c_float(beta)), c.data_ptr(), of_added, out.data_ptr(), of_out, byref(proposal.algorithm),
            space.data_ptr(), proposal.workspace, torch.cuda.current_stream(out.device).cuda_stream,
        )  # fmt: skip

    def choose(self, x: Any, weight: Any, added: Any, out: Any) -> None:
        """Keep the fastest proposal; none where there is no memory to time them in."""
        try:
            into = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
            other = torch.zeros(FLUSH // 4, device=out.device)
        except torch.OutOfMemoryError:
            self.proposals, self.chosen = [], True
            return
        events: dict[int, list[Any]] = {i: [] for i in range(len(self.proposals))}
        for _ in range(ROUNDS):
            for i, found in [*events.items()]:
                torch.sum(other), torch.sum(x)  # as between layers: only x is in the cache
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                try:
                    self.run(self.proposals[i], x, weight, added, into)
                except RuntimeError:
                    del events[i]
                    continue
                pair[1].record()
                found.append(pair)
        torch.cuda.current_stream(out.device).synchronize()

        def cost(i: int) -> float:
            time = statistics.median(a.elapsed_time(b) for a, b in events[i])
            return MARGIN * time + MEMSET if self.proposals[i].workspace else time

        self.proposals, self.chosen = [self.proposals[min(events, key=cost)]] if events else [], True


_plans: dict[tuple[Any, ...], _Plan | None] = {}  # None: PyTorch's own product
_planning = threading.Lock()


@lru_cache
def _available(device: int) -> bool:
    try:
        return bool(_handle(device))
    except (OSError, AttributeError, RuntimeError):  # another version, or none
        return False


def _supported(x: torch.Tensor, weights: Tensors, biases: Tensors, others: Tensors = ()) -> bool:
    on_gpu = x.is_cuda and torch.version.cuda is not None and x.dtype in DTYPES
    # Which algorithm is the fastest one may differ between processes.
    if not on_gpu or torch.are_deterministic_algorithms_enabled() or 0 in (*x.shape, *weights[0].shape):
        return False
    alike = all(_readable(t) and t.dtype == x.dtype for t in (x, *weights, *biases, *others))
    return alike and len({w.stride(0) for w in weights}) == 1 and _available(x.device.index)


def _readable(t: torch.Tensor) -> bool:
    """Whether a matrix has aligned rows that do not overlap; a vector is one row."""
    row = t.stride(0) if t.dim() == 2 else len(t)
    aligned = not t.data_ptr() % ALIGNED and not row * t.element_size() % ALIGNED
    return aligned and t.stride(-1) == 1 and row >= t.shape[-1]


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


def products(
    x: torch.Tensor, weights: Tensors, biases: Tensors, out: torch.Tensor, added: torch.Tensor | None = None,
    gelu: bool = False,
) -> bool:  # fmt: skip
    """Write x W^T + b of each weight to out [count, M, N], which is contiguous. The weights are a range of `batches`.

    Of one weight, out is [M, N], its rows aligned and maybe apart, and the result x W^T + b + added, added: [M, N] like
    out, maybe out itself; or its GELU with tanh. Returns False if PyTorch's own product is as fast or the only one.
    """
    m, n, k = len(x), weights[0].shape[0], x.shape[1]
    strides = tuple(t.stride(-2) for t in (x, weights[0], out if added is None else added, out))
    key = (x.device.index, x.dtype, len(weights), m, n, k, strides, not biases, added is None, gelu)
    with torch.cuda.device(x.device):
        with _planning:
            if key not in _plans:
                described = (
                    len(weights),
                    (m, n, k),
                    DTYPES[x.dtype],
                    strides,
                    bool(biases),
                    gelu,
                    added is not None,
                )
                plan = _Plan(_handle(x.device.index), *described)
                plan.place(weights, biases)
                _plans[key] = plan if plan.propose() else None
            found = _plans[key]
        if found is None:
            return False
        with found.lock:
            found.place(weights, biases)
            if not found.chosen and not torch.cuda.is_current_stream_capturing():
                found.choose(x, weights[0], added, out)
            if not found.proposals or (found.count == 1 and found.proposals[0].workspace):
                _plans[key] = None
                return False
            found.run(found.proposals[0], x, weights[0], added, out)
    return True


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    added: torch.Tensor | None = None, gelu: bool = False,
) -> bool:  # fmt: skip
    """Write x W^T + b (+ added, or its GELU) to out as `products` does, if that is supported and not PyTorch's own."""
    biases = [] if bias is None else [bias]
    others = [t for t in (out, added) if t is not None]
    return _supported(x, [weight], biases, others) and products(x, [weight], biases, out, added, gelu)


def gelu_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The GELU with tanh of x W^T + b; None if PyTorch's own is as fast, or the only one."""
    out = x.new_empty((len(x), len(weight)))
    return out if multiply(x, weight, bias, out, gelu=True) else None
