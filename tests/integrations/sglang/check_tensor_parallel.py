"""Two ranks: both are patched, or none."""

import pytest
from support.checks import LEAVES, ONLY_RANK_1_FAILS, PROMPTS
from support.hosts.sglang_engine import generate, ids, make_engine

import fastkernels
from fastkernels.patch import PatchError


def test_two_ranks(candidate):
    engine = make_engine(tp_size=2, dtype="float32")
    try:
        stock = generate(engine)
        with fastkernels.patch(engine, ops=LEAVES) as report:
            assert ids(generate(engine)) == ids(stock)
            assert report.refresh().verified and sorted(report.pids) == [0, 1]
            assert len(set(report.pids.values())) == 2
        assert generate(engine) == stock
        with fastkernels.patch(engine, ops=["attention"]) as report:
            report.reset()
            assert ids(generate(engine)) == ids(stock)
            rows = report.refresh().active
            assert [(r.rank, r.modules) for r in rows] == [(0, 2), (1, 2)]
            assert all(r.calls == 2 * 2 * 8 * len(PROMPTS) and not r.fallbacks for r in rows)
        assert generate(engine) == stock
        with fastkernels.patch(engine, ops=["all_reduce"]) as report:
            report.reset()
            assert ids(generate(engine)) == ids(stock)
            rows = report.refresh().active
            assert [(r.rank, r.host_class, r.modules) for r in rows] == [
                (rank, "GroupCoordinator", 1) for rank in (0, 1)
            ]
            assert rows[0].calls == rows[1].calls > 0
        assert ids(generate(engine)) == ids(stock)
        with pytest.raises(PatchError, match=r"another rank failed.*not on this rank"):
            fastkernels.patch(engine, candidates={"rms_norm": candidate(ONLY_RANK_1_FAILS)})
        assert ids(generate(engine)) == ids(
            stock
        )  # cached prefixes give other shapes: not bit for bit in float32
    finally:
        engine.shutdown()
