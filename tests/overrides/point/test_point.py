"""Ops of point clouds beyond their cases: properties of the curves, dense convolutions, wrong shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkernels.core.dispatch import Op
from fastkernels.overrides.point.clouds import depths_of, scan
from fastkernels.overrides.point.segment_reduce import segment_reduce
from fastkernels.overrides.point.serialize_points import serialize_points
from fastkernels.overrides.point.subm_conv3d import subm_conv3d
from fastkernels.overrides.point.voxel_neighbors import voxel_neighbors

CPU = ("torch", "reference")


def every(op: Op, *args: Any) -> torch.Tensor:
    """The result of the op, once all its providers for a CPU are compared."""
    found = [
        p.fn(*args) for p in op.providers if p.name in CPU and (p.supports is None or not p.supports(*args))
    ]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-5, equal_nan=True)
    return found[0]


def cube(side: int) -> torch.Tensor:
    return torch.cartesian_prod(*[torch.arange(side)] * 3).int()


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_curves_visit_each_cell_once(depth: int) -> None:
    """Two cells behind each other on Hilbert's curve have a common face; in z-order, 8 of them are a cube."""
    cells = cube(1 << depth)
    codes = every(serialize_points, cells, torch.zeros(len(cells), dtype=torch.int64), torch.tensor([depth]))
    for row, code in enumerate(codes):
        assert code.sort().values.tolist() == list(range(8**depth))
        along = cells[code.argsort()].long()
        if row < 2:
            groups = along.view(-1, min(8, len(cells)), 3) >> 1
            assert (groups == groups[:, :1]).all()
        else:
            assert (along.diff(dim=0).abs().sum(1) == 1).all()
    # x and y exchanged
    turned = every(
        serialize_points,
        cells[:, [1, 0, 2]],
        torch.zeros(len(cells), dtype=torch.int64),
        torch.tensor([depth]),
    )
    assert torch.equal(turned[[1, 0, 3, 2]], codes)


def test_codes_of_a_wider_cell_are_prefixes() -> None:
    """A cube of cells is one interval of each curve: pooling shifts codes, and needs no second curve."""
    cells = cube(8)
    zero = torch.zeros(len(cells), dtype=torch.int64)
    fine = every(serialize_points, cells, zero, torch.tensor([3]))
    for axis in range(4):
        wide = fine[axis] >> 3
        groups = [(cells[wide == code] >> 1).unique(dim=0) for code in wide.unique()]
        assert len(groups) == 64 and all(len(group) == 1 for group in groups)


def test_clouds_do_not_change_each_others_codes() -> None:
    coord, of = scan(300, 3, torch.Generator().manual_seed(0))
    coord[of == 1] *= 700
    depths = depths_of(coord, of, 3)
    assert depths.tolist() == [int(coord[of == i].max()).bit_length() for i in range(3)]
    codes = every(serialize_points, coord, of, depths)
    for i in range(3):
        own = every(serialize_points, coord[of == i], of[of == i] * 0, depths[i : i + 1])
        assert torch.equal(codes[:, of == i], own | i << 48)


small = st.lists(st.tuples(*[st.integers(0, 3)] * 3, st.integers(0, 2)), min_size=1, max_size=30)


@given(small, st.sampled_from([1, 3, 5]))
@settings(max_examples=40)
def test_neighbors_of_any_cells(cells: list[tuple[int, ...]], side: int) -> None:
    """Also of repeated cells, of which the first counts."""
    cells = sorted(cells, key=lambda c: c[3])
    coord, batch = torch.tensor(cells).split([3, 1], 1)
    found = every(voxel_neighbors, coord, batch[:, 0], side)
    half = side // 2
    for i, (x, y, z, b) in enumerate(cells):
        for way in range(side**3):
            step = way // side**2 - half, way // side % side - half, way % side - half
            want = (x + step[0], y + step[1], z + step[2], b)
            assert found[way, i] == (cells.index(want) if want in cells else -1)


def test_neighbors_at_the_edge_of_the_grid() -> None:
    """The largest coordinates and clouds do not run into each other."""
    last = (1 << 16) - 1
    coord = torch.tensor(
        [[0, 0, 0], [0, 0, last], [0, last, 0], [last, last, last], [0, 0, 0], [last, last, last]]
    )
    batch = torch.tensor([0, 0, 0, 0, 1, 4095])
    found = every(voxel_neighbors, coord, batch, 15)
    assert (found[15**3 // 2] == torch.arange(6)).all()
    assert int((found >= 0).sum()) == 6


@pytest.mark.parametrize("side", [3, 5])
def test_convolution_equals_a_dense_one(side: int) -> None:
    """At occupied cells, of a grid that is 0 elsewhere: what spconv's own tests compare."""
    coord, of = scan(150, 2, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(150, 6, generator=generator)
    weight = torch.randn(9, side, side, side, 6, generator=generator) * 0.1
    bias = torch.randn(9, generator=generator)
    dense = torch.zeros(2, 6, *(coord.max(0).values + 1).tolist())
    at = (of, slice(None), *coord.long().unbind(1))
    dense[at] = x
    want = F.conv3d(dense, weight.permute(0, 4, 1, 2, 3), bias, padding=side // 2)[at]
    found = every(subm_conv3d, x, weight, voxel_neighbors(coord, of, side), bias)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_nan_of_a_cell_stays_with_its_neighbors() -> None:
    coord = torch.tensor([[0, 0, 0], [0, 0, 1], [5, 5, 5]])
    neighbors = voxel_neighbors(coord, torch.zeros(3, dtype=torch.int64), 3)
    x = torch.tensor([[float("nan")], [1.0], [2.0]])
    found = every(subm_conv3d, x, torch.ones(2, 3, 3, 3, 1), neighbors)
    assert found.isnan().any(1).tolist() == [True, True, False]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from(["max", "mean", "sum"]))
@settings(max_examples=30)
def test_segments_of_any_length(sizes: list[int], reduce: str) -> None:
    count = sum(sizes)
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count)) - 2
    indices = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    found = every(segment_reduce, x, offsets, indices, reduce)
    parts = x[indices].split(sizes)
    compute = {"max": lambda p: p.amax(0), "mean": lambda p: p.mean(0), "sum": lambda p: p.sum(0)}[reduce]
    want = torch.stack([compute(p) if len(p) else torch.zeros(3) for p in parts])
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_maximum_of_nan_is_nan() -> None:
    x = torch.tensor([[1.0], [float("nan")], [3.0]])
    assert every(segment_reduce, x, torch.tensor([0, 2, 3])).isnan()[:, 0].tolist() == [True, False]


ZERO = torch.zeros(4, dtype=torch.int64)
WRONG: list[tuple[Op, tuple[Any, ...], str]] = [
    (serialize_points, (torch.zeros(4, 2).int(), ZERO, ZERO[:1]), r"grid_coord must be \[N, 3\]"),
    (serialize_points, (torch.zeros(4, 3), ZERO, ZERO[:1]), "all of int32 or int64, got .* torch.float32"),
    (voxel_neighbors, (torch.zeros(4, 3).int(), ZERO[:3], 3), r"batch \[N\], got \(4, 3\) and \(3,\)"),
    (voxel_neighbors, (torch.zeros(4, 3).int(), ZERO, 2), "kernel_size must be odd and at most 15, got 2"),
    (subm_conv3d, (torch.zeros(4, 3), torch.zeros(2, 3, 3, 3, 4), torch.zeros(27, 4)), r"x must be \[N, I\]"),
    (subm_conv3d, (torch.zeros(4, 3), torch.zeros(2, 3, 3, 3, 3), torch.zeros(4, 27)), r"must be \[27, 4\]"),
    (segment_reduce, (torch.zeros(4, 3), ZERO[:2], None, "min"), "must be one of max, mean, sum, got 'min'"),
    (segment_reduce, (torch.zeros(4), ZERO[:2]), r"x must be \[N, C\]"),
]


@pytest.mark.parametrize(("op", "args", "message"), WRONG)
def test_wrong_arguments_are_named(op: Op, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(*args)
