"""Results of recurrent kernels in the memory of a host."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastkernels.overrides.recurrence.kernels.results import result_like, results_in
from fastkernels.overrides.recurrence.pools import fill


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
