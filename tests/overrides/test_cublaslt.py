"""Products in cuBLASLt: on a GPU its own, elsewhere a library of the test that computes what the real one documents."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastkernels.overrides.kit import cublaslt
from fastkernels.overrides.linear.modules import products


def arguments(
    device: str, count: int = 2, m: int = 70, n: int = 40, k: int = 136, bias: bool = True, wide: bool = False
) -> tuple[Any, ...]:
    """x, weights at equal distances, biases, and where to write; wide: x and weights are parts of wider tensors."""
    draw = torch.Generator().manual_seed(m)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device, torch.bfloat16)

    x, weights = tensor(m, 2 * k if wide else k), tensor(count, 2 * n, 2 * k if wide else k) / 8
    biases = [*tensor(count, n)] if bias else []
    return x[:, -k:], [w[:n, :k] for w in weights], biases, tensor(count, m, n)


def expected(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], _: Any
) -> torch.Tensor:
    found = [x.double() @ w.double().t() for w in weights]
    return torch.stack([y + b.double() for y, b in zip(found, biases, strict=True)] if biases else found)


class Library:
    """cuBLASLt's functions on memory of the CPU, as its documentation defines them: matrices are stored by column.

    Algorithms 0 to 2 need no workspace, and 3 to 5 do. The second of three is the fastest, the third one fails.
    """

    def __init__(self) -> None:
        self.objects: dict[int, dict[Any, Any]] = {}
        self.clock, self.ran, self.state = 0, list[int](), {"capturing": False}
        self.free, self.milliseconds = False, (5.0, 3.0, 9.0, 5.0, 4.0, 9.0)

    def _new(self, handle: Any, **values: Any) -> int:
        number = 1 + len(self.objects)
        self.objects[number], handle._obj.value = values, number
        return 0

    def _put(self, target: Any, attribute: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(value._obj)
        self.objects[target.value][attribute] = value._obj.value
        return 0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cublasLt"):
            return found

        def checked(*args: Any) -> int:
            assert len(args) == len(cublaslt.PROTOTYPES[name.removeprefix("cublasLt")])
            return found(*args)

        return checked

    def cublasLtCreate(self, handle: Any) -> int:
        return self._new(handle)

    def cublasLtMatmulDescCreate(self, handle: Any, compute: int, scale: int) -> int:
        return self._new(handle, types=(compute, scale))

    def cublasLtMatrixLayoutCreate(
        self, handle: Any, dtype: int, rows: int, columns: int, leading: int
    ) -> int:
        assert dtype == 14 and leading >= rows
        return self._new(handle, shape=(rows, columns), leading=leading)

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self._new(handle)

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = (
        cublasLtMatmulPreferenceSetAttribute
    ) = _put

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, *given: Any) -> int:
        *_, preference, count, found, returned = given
        first = 3 * (self.objects[preference.value][1] > 0)
        for i, state in enumerate((0, 0, 0, 7)):
            made = found._obj[i]
            made.algorithm[0], made.workspace, made.state = first + i, 4 * (first > 0 or self.free), state
        returned._obj.value = min(count, 4)
        return 0

    def _matrix(self, pointer: int, layout: Any, batch: int) -> torch.Tensor:
        values = self.objects[layout.value]
        return self._memory(pointer + 2 * batch * values.get(6, 0), values["shape"], values["leading"])

    def _memory(self, pointer: int, shape: tuple[int, int], leading: int) -> torch.Tensor:
        size = 2 * ((shape[1] - 1) * leading + shape[0])
        memory = torch.frombuffer((ctypes.c_char * size).from_address(pointer), dtype=torch.bfloat16)
        return memory.as_strided(shape, (1, leading))

    def cublasLtMatmul(self, handle: Any, description: Any, alpha: Any, *given: Any) -> int:
        a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, _, size, _ = given
        number, how = algorithm._obj[0], self.objects[description.value]
        self.ran.append(number)
        assert how["types"] == (68, 0) and how[3] == 1 and alpha._obj.value == 1
        assert size == 4 * (number > 2) and of_c.value != of_d.value
        if number in (2, 5):
            return 15
        self.clock += self.milliseconds[number]
        for i in range(self.objects[of_a.value][5]):
            y = self._matrix(a, of_a, i).double().t() @ self._matrix(b, of_b, i).double()
            y += beta._obj.value * self._matrix(c, of_c, i).double() if beta._obj.value else 0
            if how[7] & 4:
                y += self._memory(how[8] + 2 * i * how.get(10, 0), (y.shape[0], 1), y.shape[0]).double()
            self._matrix(d, of_d, i).copy_(F.gelu(y, approximate="tanh") if how[7] & 32 else y)
        return 0


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


KINDS: dict[str, dict[str, Any]] = {"plain": {"bias": False}, "three": {"count": 3}, "wide": {"wide": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_float64(kind: str, library: Library) -> None:
    for _ in range(2):  # the first call also times the algorithms; the second finds other tensors
        given = arguments("cpu", **KINDS[kind])
        kept = [t.clone() for t in (given[0], *given[1])]
        assert cublaslt.products(*given)
        torch.testing.assert_close(given[3].double(), expected(*given), rtol=1e-2, atol=1e-2)
        assert all(map(torch.equal, kept, (given[0], *given[1])))
    # five rounds of six algorithms, of which two fail, and the two calls
    assert sorted(library.ran[:-2]) == [0] * 5 + [1] * 5 + [2] + [3] * 5 + [4] * 5 + [5] and library.ran[
        -2:
    ] == [1, 1]


def test_without_memory_to_time_in_products_are_those_of_pytorch(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_strided", full)
    assert [cublaslt.products(*arguments("cpu")) for _ in range(2)] == [False] * 2 and not library.ran


def test_first_proposal_runs_in_a_capture_and_is_not_kept(library: Library) -> None:
    library.state["capturing"] = True
    cublaslt.products(*arguments("cpu"))
    assert library.ran == [0]
    library.state["capturing"] = False
    cublaslt.products(*arguments("cpu"))
    cublaslt.products(*arguments("cpu", m=8))
    assert library.ran[-1] == 1 and len(cublaslt._plans) == 2


@pytest.mark.parametrize("kind", ["bias", "gelu", "added", "in_place", "columns"])
def test_product_is_that_of_float64(kind: str, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_supported", lambda *given: True)
    for _ in range(2):
        x, (weight,), (bias,), (out,) = arguments("cpu", 1, wide=kind == "columns")
        more, wanted = {}, x.double() @ weight.double().t() + bias.double()
        if kind == "gelu":
            more, wanted = {"gelu": True}, F.gelu(wanted, approximate="tanh")
        elif kind in ("added", "in_place"):
            more["added"] = out if kind == "in_place" else torch.ones(70, 80).bfloat16()[:, 40:]
            wanted = wanted + more["added"].double()
        elif kind == "columns":
            out = torch.zeros(70, 88, dtype=torch.bfloat16)[:, 48:]
        assert cublaslt.multiply(x, weight, bias, out, **more)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)
    # the proposals without a workspace, and the one that PyTorch runs
    assert sorted(library.ran[:-2]) == [0] * 5 + [1] * 5 + [2] + [3] * 5 and library.ran[-2:] == [1, 1]


@pytest.mark.parametrize(("times", "batch", "single"), [
    ((5.0, 3.0, 9.0, 2.9, 5.0, 9.0), 3, False), ((5.0, 3.0, 9.0, 2.98, 5.0, 9.0), 1, True),
    ((5.0, 3.0, 9.0, 5.0, 2.0, 9.0), 4, True),
])  # fmt: skip
def test_workspace_has_to_pay(
    times: tuple[float, ...], batch: int, single: bool, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is faster with one stays PyTorch's, whose own first proposal it is."""
    monkeypatch.setattr(cublaslt, "_supported", lambda *given: True)
    library.milliseconds = times
    assert cublaslt.products(*arguments("cpu")) and library.ran[-1] == batch
    x, weights, biases, out = arguments("cpu", 1)
    assert [cublaslt.multiply(x, weights[0], biases[0], out[0]) for _ in range(2)] == [single] * 2
    library.free, before = True, len(library.ran)  # none runs without a workspace
    cublaslt._plans.clear()
    assert not cublaslt.multiply(x, weights[0], biases[0], out[0]) and len(library.ran) == before + 5


def test_weights_at_equal_distances_are_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_supported", lambda *given: True)
    x, (a, b, c), (p, q, r), _ = arguments("cpu", 3)
    far = arguments("cpu", 1)[1][0]
    far = far if far.data_ptr() > c.data_ptr() else arguments("cpu", 1, m=71)[1][0]
    for weights, biases, found in (
        ((a, b, c), (), [(0, 3)]), ((a, b, c), (p, q, r), [(0, 3)]), ((a,), (), [(0, 1)]), ((a, c), (), [(0, 2)]),
        ((c, a), (), [(0, 1), (1, 2)]), ((c, a, b), (), [(0, 1), (1, 3)]), ((a, c, b), (), [(0, 2), (2, 3)]),
        ((c, b, a), (), [(0, 1), (1, 2), (2, 3)]), ((a, b), (q, p), [(0, 1), (1, 2)]), ((a, a), (), [(0, 1), (1, 2)]),
        ((a, b, c), (r, p, q), [(0, 1), (1, 3)]),
    ):  # fmt: skip
        assert cublaslt.batches(x, weights, biases) == found


def test_rows_are_aligned_and_do_not_overlap() -> None:
    x = torch.zeros(16, 136, dtype=torch.bfloat16)
    for t in (x, x[:, 8:], x[:1], x[0], x[0, 8:]):
        assert cublaslt._readable(t)
    for t in (x[:, 4:], x[0, 4:], x.t(), x[:1].expand(5, -1), torch.zeros(16, 100).bfloat16(), x[0, :12]):
        assert not cublaslt._readable(t)


@pytest.mark.parametrize("kind", ["plain", "bias", "hook", "float64", "other_size", "one_bias"])
def test_layers_of_one_input(kind: str) -> None:
    """Results of plain layers of one size come from one op, wherever it runs."""
    layers = [torch.nn.Linear(8, 6, bias=kind not in ("plain", "one_bias")) for _ in range(3)]
    x = torch.randn(2, 5, 8)
    if kind == "hook":
        layers[1].register_forward_hook(lambda m, args, out: 2 * out)
    elif kind == "float64":
        layers, x = [layer.double() for layer in layers], x.double()
    elif kind in ("other_size", "one_bias"):
        layers[2] = torch.nn.Linear(8, 7 if kind == "other_size" else 6)
    ran: list[str] = []

    class Ran(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Ran():
            found = products(layers, x)
        for y, layer in zip(found, layers, strict=True):
            torch.testing.assert_close(y, layer(x))
    together = kind in ("plain", "bias", "float64", "one_bias")
    assert ("fastkernels.linear_products.default" in ran) == together


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(70, 40, 136), (2048, 1280, 1280), (154, 1280, 2048), (1, 8, 8)])
def test_products_on_a_gpu(kind: str, sizes: tuple[int, int, int]) -> None:
    """The first call, and a CUDA graph of the second, give the same; without a first call a capture works, too."""
    for warm in (True, False):
        cublaslt._plans.clear()
        given = arguments("cuda", m=sizes[0], n=sizes[1], k=sizes[2], **KINDS[kind])
        assert cublaslt.batches(*given[:3]) == [(0, len(given[1]))]
        wanted = expected(*given)
        if warm:
            assert cublaslt.products(*given)
            torch.testing.assert_close(
                given[3].double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())
            )
        first = given[3].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cublaslt.products(*given)
        given[3].zero_()
        graph.replay()
        torch.testing.assert_close(
            given[3].double(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())
        )
        assert not warm or torch.equal(given[3], first)
