"""Two stages of a pipeline: each patches its own layers, and the report covers both."""

import pytest
from support.checks import LEAVES
from support.hosts.sglang_engine import generate, ids, make_engine

import fastkernels
from fastkernels.patch import PatchError


def test_two_stages():
    engine = make_engine(pp_size=2)
    try:
        stock = generate(engine)
        with fastkernels.patch(engine, ops=[*LEAVES, "embedding"]) as report:
            assert ids(generate(engine)) == ids(stock)
            assert report.refresh().verified and sorted(report.pids) == [0, 1]
            modules = {(r.rank, r.op): r.modules for r in report.active}
            assert modules[0, "embedding"] == 1 and (1, "embedding") not in modules
            assert (modules[0, "rms_norm"], modules[1, "rms_norm"]) == (
                2,
                3,
            )  # the last stage has the final norm
        assert generate(engine) == stock
        with fastkernels.patch(engine, ops=["embedding"]) as report:  # nothing to do in the second stage
            assert ids(generate(engine)) == ids(stock)
            assert [(r.rank, r.modules) for r in report.refresh().active] == [(0, 1)] and report.verified
        with pytest.raises(PatchError, match="nothing to patch: gemma_rms_norm"):
            fastkernels.patch(engine, ops=["gemma_rms_norm"])
        assert generate(engine) == stock
    finally:
        engine.shutdown()
