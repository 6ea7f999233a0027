"""Arguments as plain data and bytes: values and views survive the way into another process."""

from __future__ import annotations

from typing import Any

import torch
from fk_bench.kernels.judge.memory import layout
from hypothesis import given
from hypothesis import strategies as st

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.text(), st.floats(allow_nan=False),
    st.sampled_from([torch.bfloat16, torch.int32, torch.float8_e4m3fn]),
)  # fmt: skip
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(st.lists(nested))
def test_values_other_than_tensors_round_trip(args: list[Any]) -> None:
    plan = layout.describe(args, 1 << 62).to_json()
    assert layout.bind(plan, torch.zeros(0, dtype=torch.uint8), 0, 1) == args


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2))
def test_views_keep_their_storage(a: int, b: int, c: int, slot: int) -> None:
    whole = torch.arange(2 * a * b * c, dtype=torch.float32)
    args = [whole[: a * b * c].view(a, b, c).transpose(0, 2), {"rest": whole[a * b * c :]}, torch.ones(3)]
    made = layout.describe(args, 1 << 62)
    arena = torch.zeros(made.arena_bytes(3), dtype=torch.uint8)
    view, rest, apart = layout.tensors(layout.bind(made.to_json(), arena, slot, 3))
    assert view.shape == args[0].shape and view.stride() == args[0].stride()
    assert rest.data_ptr() - view.data_ptr() == 4 * a * b * c
    before = apart.clone()
    view.copy_(args[0]), rest.copy_(args[1]["rest"])
    assert torch.equal(view, args[0]) and torch.equal(rest, args[1]["rest"]) and torch.equal(apart, before)
