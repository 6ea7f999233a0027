"""Products in cuBLASLt: on a GPU its own, elsewhere a library of the test that computes what the real one documents."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastkernels.overrides.kit import cublaslt

KINDS = ("plain", "bias", "gelu", "residual", "in_place", "columns", "rows")


def arguments(kind: str, device: str, m: int = 70, n: int = 40, k: int = 136) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(m)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device, torch.bfloat16)

    given: dict[str, Any] = {"x": tensor(m, k), "weight": tensor(n, k) / 8}
    if kind in ("bias", "gelu", "columns"):
        given["bias"] = tensor(n)
    if kind == "gelu":
        given["gelu"] = True
    if kind == "residual":
        given["residual"] = tensor(m, 2 * n)[:, n:]
    if kind == "in_place":
        given["residual"] = given["out"] = tensor(m, n)
    if kind == "columns":
        given["x"], given["weight"] = tensor(m, 3 * k)[:, k : 2 * k], (tensor(n, 2 * k) / 8)[:, :k]
    if kind == "rows":
        given["out"] = tensor(2 * m, n)[m:]
    return given


def expected(x: Any, weight: Any, bias: Any = None, residual: Any = None, gelu: bool = False, out: Any = None) -> Any:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = y if residual is None else y + residual.double()
    return F.gelu(y, approximate="tanh") if gelu else y


class Library:
    """cuBLASLt's functions on memory of the CPU, as its documentation defines them: matrices are stored by column.

    Its first algorithm is slower than the second, and the third one fails.
    """

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.clock, self.ran, self.state = 0, list[int](), {"capturing": False}

    def _new(self, handle: Any, **values: Any) -> int:
        number = 1 + len(self.objects)
        self.objects[number], handle._obj.value = values, number
        return 0

    def _put(self, target: Any, attribute: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(value._obj)
        self.objects[target.value][attribute] = value._obj.value
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self._new(handle)

    def cublasLtMatmulDescCreate(self, handle: Any, compute: int, scale: int) -> int:
        return self._new(handle, types=(compute, scale))

    def cublasLtMatrixLayoutCreate(self, handle: Any, dtype: int, rows: int, columns: int, leading: int) -> int:
        assert dtype == 14 and leading >= rows
        return self._new(handle, shape=(rows, columns), leading=leading)

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self._new(handle)

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _put

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *given: Any) -> int:
        *_, preference, count, found, returned = given
        assert self.objects[preference.value][1] == cublaslt.WORKSPACE and count >= 4
        for i, state in enumerate((0, 0, 0, 7)):
            found._obj[i].algorithm[0], found._obj[i].workspace, found._obj[i].state = i, 16 * i, state
        returned._obj.value = 4
        return 0

    def _matrix(self, pointer: int, layout: Any) -> torch.Tensor:
        (rows, columns), leading = (self.objects[layout.value][name] for name in ("shape", "leading"))
        size = 2 * ((columns - 1) * leading + rows)
        memory = torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.bfloat16)
        return memory.as_strided((rows, columns), (1, leading))

    def cublasLtMatmul(self, handle: Any, description: Any, alpha: Any, *given: Any) -> int:
        a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, space, size, stream = given
        number, how = algorithm._obj[0], self.objects[description.value]
        self.ran.append(number)
        assert how["types"] == (68, 0) and how[3] == 1 and alpha._obj.value == 1 and size == 16 * number
        if number == 2:
            return 15
        self.clock += (5, 3)[number]
        y = self._matrix(a, of_a).double().t() @ self._matrix(b, of_b).double()
        if beta._obj.value:
            y += beta._obj.value * self._matrix(c, of_c).double()
        if how[7] & 4:
            y += self._matrix(how[8], self._column(y.shape[0])).double()
        self._matrix(d, of_d).copy_(F.gelu(y, approximate="tanh") if how[7] & 32 else y)
        return 0

    def _column(self, rows: int) -> Any:
        made = ctypes.c_void_p()
        self._new(ctypes.byref(made), shape=(rows, 1), leading=rows)
        return made


class Event:
    library: Library

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = self.library.clock

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Event.library = Library()
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(cublaslt, "_library", lambda: made)
    monkeypatch.setattr(cublaslt, "_plans", {})
    monkeypatch.setattr(cublaslt, "FLUSH", 64)
    for name, value in (
        ("device", lambda device: nullcontext()), ("Event", Event), ("current_stream", lambda device: stream),
        ("is_current_stream_capturing", lambda: made.state["capturing"]),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    cublaslt._handle.cache_clear()
    yield made
    cublaslt._handle.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_product_is_that_of_float64(kind: str, library: Library) -> None:
    given = arguments(kind, "cpu")
    wanted, kept = expected(**given), [given[n].clone() for n in ("x", "weight")]
    for _ in range(2):  # the first call also times the algorithms
        given = arguments(kind, "cpu")
        found = cublaslt.product(**given)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-2)
        assert found is given.get("out", found) and found.shape == (70, 40)
    assert torch.equal(given["x"], kept[0]) and torch.equal(given["weight"], kept[1])
    # five rounds of three algorithms, of which one fails, and the two calls
    assert sorted(library.ran[:-2]) == [0] * 5 + [1] * 5 + [2] and library.ran[-2] == library.ran[-1] == 1


def test_first_proposal_runs_in_a_capture_and_is_not_kept(library: Library) -> None:
    library.state["capturing"] = True
    cublaslt.product(**arguments("bias", "cpu"))
    assert library.ran == [0]
    library.state["capturing"] = False
    cublaslt.product(**arguments("bias", "cpu"))
    cublaslt.product(**arguments("bias", "cpu", m=8))
    assert library.ran[-1] == 1 and len(cublaslt._plans) == 2


def test_close_times_keep_the_first_proposal(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MARGIN", 0.5)
    cublaslt.product(**arguments("plain", "cpu"))
    assert library.ran[-1] == 0


def test_unsupported_arguments_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_on_gpu", lambda x: True)
    monkeypatch.setattr(cublaslt, "_unavailable", lambda device: None)
    given = arguments("residual", "cpu")
    x, weight, residual = given["x"], given["weight"], given["residual"]
    assert cublaslt.unsupported(x, weight, None, residual) is None
    for wrong, why in (
        ((x.float(), weight.float()), "x is torch.float32"),
        ((x, weight.half()), "torch.float16"),
        ((x, weight, None, residual[:, 1:]), r"strides \(80, 1\)"),
        ((x[:, 4:], weight[:, 4:]), "strides"),
        ((x[:1].expand(5, -1), weight), r"strides \(0, 1\)"),
        ((x.t(), weight.t()), r"strides \(1, 136\)"),
        ((x[:0], weight), r"x is torch.bfloat16 \(0, 136\)"),
    ):
        assert re.search(why, cublaslt.unsupported(*wrong) or "")
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in (cublaslt.unsupported(x, weight) or "")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(70, 40, 136), (512, 3072, 3072), (154, 1280, 2048), (1, 8, 8)])
def test_product_on_a_gpu(kind: str, sizes: tuple[int, int, int]) -> None:
    """The first call, and a CUDA graph of the second, give the same; without a first call a capture works, too."""
    for warm in (True, False):
        cublaslt._plans.clear()
        given = arguments(kind, "cuda", *sizes)
        assert cublaslt.unsupported(*(given.get(n) for n in ("x", "weight", "bias", "residual", "out"))) is None
        wanted, own = expected(**given), given.get("residual") if kind == "in_place" else None
        before = None if own is None else own.clone()
        if warm:
            first = cublaslt.product(**given).clone()
            torch.testing.assert_close(first.double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cublaslt.product(**given)
        if own is not None:
            own.copy_(before)
        graph.replay()
        torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))
        assert not warm or torch.equal(out, first)
