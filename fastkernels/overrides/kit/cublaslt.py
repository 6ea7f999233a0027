"""Products in cuBLASLt, with the algorithm that is fastest for a shape on this GPU and a residual in the epilogue.

PyTorch takes the first algorithm that cuBLASLt proposes. Here the first call of a shape times the proposals on its own
tensors, and later calls run the fastest. A call in a CUDA graph's capture that comes first runs the first proposal.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any

import torch

DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
ALIGNED = 16  # bytes, of pointers and rows
WORKSPACE = 32 << 20  # bytes, PyTorch's on Hopper
PROPOSALS, ROUNDS = 16, 5
MARGIN = 0.99  # of the first proposal's time: another one has to be faster
FLUSH = 64 << 20  # bytes read before each timed call, more than an H100's L2 cache
_FP32, _COMPUTE_FP32 = 0, 68
# Attributes of a product's description and of a preference, and epilogues
_TRANSPOSE_A, _EPILOGUE, _BIAS, _MAX_WORKSPACE, _REDUCTION, _ALIGNMENTS = 3, 7, 8, 1, 3, (5, 6, 7, 8)
_PLAIN, _WITH_BIAS, _GELU, _GELU_WITH_BIAS = 1, 4, 32, 36
_REDUCE_FP32 = 2  # the parts of a split sum are added in float32


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@lru_cache
def _library() -> Any:
    """The library that PyTorch has loaded. Raises OSError."""
    version = (torch.version.cuda or "").partition(".")[0]
    found = ctypes.CDLL(f"libcublasLt.so.{version}")
    pointer, integers = c_void_p, (c_uint64, c_uint64, c_int64)
    for name, *arguments in (
        ("Create", pointer), ("MatmulDescCreate", pointer, c_int, c_int),
        ("MatmulDescSetAttribute", pointer, c_int, pointer, c_size_t), ("MatrixLayoutCreate", pointer, c_int, *integers),
        ("MatmulPreferenceCreate", pointer), ("MatmulPreferenceSetAttribute", pointer, c_int, pointer, c_size_t),
        ("MatmulAlgoGetHeuristic", *[pointer] * 7, c_int, pointer, pointer),
        ("Matmul", *[pointer] * 13, c_size_t, pointer),
    ):  # fmt: skip
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


class _Plan:
    """One kind of product: its description and the algorithm that it runs."""

    def __init__(self, m: int, n: int, k: int, dtype: int, strides: tuple[int, ...], bias: bool, gelu: bool):
        of_x, of_weight, of_added, of_out = strides
        self.lock, self.bias, self.chosen = threading.Lock(), bias, False
        self.description = _made("MatmulDesc", _COMPUTE_FP32, _FP32)
        _set("MatmulDesc", self.description, _TRANSPOSE_A, c_int32(1))
        epilogue = (_GELU_WITH_BIAS if bias else _GELU) if gelu else _WITH_BIAS if bias else _PLAIN
        _set("MatmulDesc", self.description, _EPILOGUE, c_uint32(epilogue))
        # cuBLASLt's matrices are stored by column: out^T [n, m] = weight [n, k] x^T [k, m], weight^T and x^T as stored
        sizes = (k, n, of_weight), (k, m, of_x), (n, m, of_added), (n, m, of_out)
        self.layouts = [_made("MatrixLayout", dtype, *size) for size in sizes]
        self.proposals: list[_Proposal] = []

    def propose(self, handle: c_void_p) -> None:
        preference = _made("MatmulPreference")
        _set("MatmulPreference", preference, _MAX_WORKSPACE, c_uint64(WORKSPACE))
        _set("MatmulPreference", preference, _REDUCTION, c_uint32(_REDUCE_FP32))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, c_uint32(ALIGNED))
        found, count = (_Proposal * PROPOSALS)(), c_int()
        given = (self.description, *self.layouts, preference, PROPOSALS, byref(found), byref(count))
        _call("MatmulAlgoGetHeuristic", handle, *given)
        self.proposals = [p for p in found[: count.value] if p.state == 0]
        if not self.proposals:
            raise RuntimeError("cuBLASLt proposes no algorithm")

    def run(self, handle: c_void_p, proposal: _Proposal, beta: float, x: Any, weight: Any, added: Any, out: Any) -> None:
        space = torch.empty(proposal.workspace, dtype=torch.uint8, device=out.device)
        of_weight, of_x, of_added, of_out = self.layouts
        _call(
            "Matmul", handle, self.description, byref(c_float(1.0)), weight.data_ptr(), of_weight, x.data_ptr(), of_x,
            byref(c_float(beta)), added.data_ptr(), of_added, out.data_ptr(), of_out, byref(proposal.algorithm),
            space.data_ptr(), proposal.workspace, torch.cuda.current_stream(out.device).cuda_stream,
        )  # fmt: skip

    def choose(self, handle: c_void_p, beta: float, x: Any, weight: Any, added: Any, out: Any) -> None:
        """Put the fastest proposal first."""
        into = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        other = torch.zeros(FLUSH // 4, device=out.device)
        events: dict[int, list[Any]] = {i: [] for i in range(len(self.proposals))}
        for _ in range(ROUNDS):
            for i, found in [*events.items()]:
                torch.sum(other), torch.sum(x)  # as between layers: only x is in the cache
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                try:
                    self.run(handle, self.proposals[i], beta, x, weight, added, into)
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


_plans: dict[tuple[Any, ...], _Plan] = {}
_planning = threading.Lock()


@lru_cache
def _unavailable(device: int) -> str | None:
    """Why cuBLASLt cannot be called here, or None."""
    try:
        _handle(device)
    except (OSError, AttributeError, RuntimeError) as error:
        return f"cuBLASLt cannot be called ({type(error).__name__}: {error})"
    return None


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.cuda is not None


def unsupported(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    """Why `product` does not take these, or None. x: [M, K]; weight: [N, K]; others: bias, residual, out."""
    if not _on_gpu(x):
        return "not on an NVIDIA GPU"
    if torch.are_deterministic_algorithms_enabled():
        return "PyTorch's algorithms are deterministic; here time decides"
    if x.dtype not in DTYPES or 0 in (*x.shape, *weight.shape):
        return f"x is {x.dtype} {tuple(x.shape)}"
    for t in (x, weight, *others):
        if t is None:
            continue
        rows = t.stride(0) if t.dim() == 2 else len(t)
        aligned = not t.data_ptr() % ALIGNED and not rows * t.element_size() % ALIGNED
        if t.dtype != x.dtype or t.stride(-1) != 1 or rows < t.shape[-1] or not aligned:
            return f"a tensor is {t.dtype} with strides {t.stride()}"
    return _unavailable(x.device.index)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    gelu: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + bias + residual, or its GELU with tanh, rounded once; x: [M, K], weight: [N, K], residual, out: [M, N].

    out: where to write; it may be the residual. The arguments are supported, see `unsupported`.
    """
    (m, k), n = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    added = out if residual is None else residual
    strides = (x.stride(0), weight.stride(0), added.stride(0), out.stride(0))
    beta = 0.0 if residual is None else 1.0
    key = (x.device.index, x.dtype, m, n, k, strides, bias is None, beta, gelu)
    with torch.cuda.device(x.device):
        handle, plan = _handle(x.device.index), _plans.get(key)
        if plan is None:
            with _planning:
                plan = _Plan(m, n, k, DTYPES[x.dtype], strides, bias is not None, gelu)
                plan.propose(handle)
                _plans[key] = plan
        with plan.lock:
            if bias is not None:
                _set("MatmulDesc", plan.description, _BIAS, c_void_p(bias.data_ptr()))
            if not plan.chosen and not torch.cuda.is_current_stream_capturing():
                plan.choose(handle, beta, x, weight, added, out)
            plan.run(handle, plan.proposals[0], beta, x, weight, added, out)
    return out
