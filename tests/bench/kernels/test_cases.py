"""The cases of an op: extreme values for every dtype, on shapes that no candidate can know."""

from __future__ import annotations

import pytest
import torch
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.kernels.judge.memory import layout

from fastkernels.core import registry

OPS = ["rms_norm", "silu_and_mul", "linear", "topk_softmax"]
KINDS = {"large", "tiny", "equal", "zero", "outlier"}


@pytest.mark.parametrize("op", OPS)
def test_extremes_cover_every_dtype_and_kind(op: str) -> None:
    spec = registry.get(op)
    here = [t.case for t in trials(spec, ("random",), "cpu") if t.gpu_only(spec) is None]
    found = [t.case for t in trials(spec, ("extreme",), "cpu")]
    kinds = KINDS | set(spec.extremes)
    assert {c.name for c in found} == {f"{c.dtype}:{kind}" for c in here for kind in kinds}
    assert len(found) == len({c.name for c in found})
    assert all(c.dtype == c.name.partition(":")[0] for c in found)


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "linear"])
def test_extremes_have_secret_shapes(op: str) -> None:
    """Drawn anew in each run: a kernel that is right for the published shapes only is wrong in some."""
    spec = registry.get(op)
    published = [c.dims for c in spec.cases]
    runs = [[t.case.dims for t in trials(spec, ("extreme",), "cpu")] for _ in range(4)]
    drawn = [dims for run in runs for dims in run]
    new = [dims for dims in drawn if dims not in published]
    assert len(new) > 0.8 * len(drawn)
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])
    assert len({str(dims) for dims in new}) > len(runs[0])


@pytest.mark.parametrize("op", OPS)
def test_extremes_are_small_checked_and_not_timed(op: str) -> None:
    spec = registry.get(op)
    for trial in trials(spec, ("extreme",), "cpu"):
        assert not trial.timed and trial.gpu_only(spec) is None and trial.source == "extreme"


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul"])
def test_edit_makes_the_named_values(op: str) -> None:
    spec = registry.get(op)
    for trial in trials(spec, ("extreme",), "cpu"):
        kind = trial.case.name.partition(":")[2]
        args = trial.make("cpu", torch.Generator().manual_seed(1))
        assert trial.edit is not None
        before = [t.clone() for t in layout.tensors(args)]
        trial.edit(args)
        x = layout.tensors(args[spec.activations[0]])[0]
        assert str(x.dtype).endswith(trial.case.dtype)
        if kind == "zero":
            assert not x.any()
        elif kind == "equal":
            assert (x == 0.75).all()
        elif kind == "outlier":
            assert (x == 1000).sum() == 1
        elif kind in ("large", "tiny"):
            ratio = x.float().abs().mean() / before[spec.activations[0]].float().abs().mean()
            assert ratio == pytest.approx(64 if kind == "large" else 2.0**-12, rel=1e-3)
