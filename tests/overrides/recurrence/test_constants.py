"""Constants of decodes that stay in memory, and results in the memory of a host."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastkernels.overrides.recurrence.kernels import constants
from fastkernels.overrides.recurrence.kernels.constants import each, is_each, is_none, none
from fastkernels.overrides.recurrence.kernels.results import result_like, results_in
from fastkernels.overrides.recurrence.pools import fill


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "_kept", {})


def test_constants_are_known_by_their_memory() -> None:
    for count in (1, 63, 1000, 5000):
        x = torch.empty(count, 2)
        borders, fresh = each(x), none(x)
        assert borders.tolist() == [*range(count + 1)] and fresh.tolist() == [False] * count
        assert is_each(borders) and is_none(fresh)
        assert not is_each(borders.clone()) and not is_none(fresh.clone()) and not is_none(borders)


def test_constants_of_a_step_in_inference_mode_serve_autograd() -> None:
    with torch.inference_mode():
        each(torch.empty(3))
    weight = torch.ones(4, requires_grad=True)
    (each(torch.empty(3)) * weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [0, 1, 2, 3]


def test_constants_stay_where_a_cuda_graph_reads_them() -> None:
    few = weakref.ref(none(torch.empty(3))._base)
    none(torch.empty(5000))
    assert few() is not None


def test_traced_code_makes_its_own_constants() -> None:
    each(torch.empty(3))
    none(torch.empty(3))
    with FakeTensorMode():
        x = torch.empty(3)
        assert each(x).shape == (4,) and none(x).dtype == torch.bool
    traced = torch.compile(lambda x: (each(x), none(x)), backend="eager", dynamic=True, fullgraph=True)
    for count in (3, 1500):
        borders, fresh = traced(torch.empty(count))
        assert len(borders) == count + 1 and len(fresh) == count and not is_each(borders)


def test_results_are_filled_in_place_unless_memory_is_shared() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = result_like(x)
        places.append(out.data_ptr())
        return torch.add(x, x, out=out)

    places: list[int] = []
    x, out = torch.randn(3, 4), torch.empty(3, 4)
    fill(out, twice, x)
    assert torch.equal(out, 2 * x) and places == [out.data_ptr()]
    both = torch.randn(2, 3, 4)
    want = 2 * both[0]
    for result in (both[1], torch.empty(3, 4, dtype=torch.float64), torch.empty(4, 3).t()):
        fill(result, twice, both[0])
        assert torch.equal(result, want.to(result.dtype)) and places.pop() != result.data_ptr()
    with results_in(out):
        assert result_like(x) is out and result_like(x) is not out
    assert result_like(x) is not out
    with FakeTensorMode():
        fill(torch.empty(3, 4), torch.neg, torch.empty(3, 4))
