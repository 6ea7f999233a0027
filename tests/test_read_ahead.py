"""The order in which weights are read: learned from calls, forgotten with the weights, off unless it is enabled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastkernels import read_ahead
from fastkernels.overrides.l1.linear import linear


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    read_ahead.enable(0)


def weights(*rows: int) -> list[torch.Tensor]:
    return [torch.zeros(n, 64, dtype=torch.bfloat16) for n in rows]


def test_off_until_it_is_enabled() -> None:
    a, b = weights(8, 8)
    for w in (a, b, a, b):
        assert read_ahead.after(w) == (None, 0)


def test_the_second_pass_knows_the_order() -> None:
    made = weights(8, 16, 24)
    read_ahead.enable(limit=1500)
    for w in made:
        assert read_ahead.after(w) == (None, 0)
    sizes = []
    for i in (0, 1, 2):
        following, size = read_ahead.after(made[i])
        assert following is made[(i + 1) % 3]
        sizes.append(size)
    assert sizes == [1488, 1488, 1024]  # the limit in whole pieces of 16 bytes; all of the first one


def test_a_weight_that_is_gone_is_not_read() -> None:
    a, b = weights(8, 8)
    read_ahead.enable()
    for w in (a, b, a, b):
        read_ahead.after(w)
    del b, w
    assert read_ahead.after(a) == (None, 0)


def test_the_order_follows_the_calls() -> None:
    a, b, c = weights(8, 8, 8)
    read_ahead.enable()
    for w in (a, b, a, c, a):
        found = read_ahead.after(w)
    assert found[0] is c


def test_calls_of_the_op_are_the_order() -> None:
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    a, b = weights(8, 8)
    read_ahead.enable()
    if linear.order("cpu")[0][0].name != "onednn":
        pytest.skip("linear has another first provider here")
    for w in (a, b, a, b):
        linear(x, w)
    assert read_ahead.after(a)[0] is b
