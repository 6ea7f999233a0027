"""Two ranks with data-parallel attention: tokens come to all ranks by ours, in both ranks, and the undo is exact."""

import os
from pathlib import Path

from support.hosts.sglang_engine import generate, ids, make_engine

import fastkernels


def test_ranks_collect_tokens_by_ours(monkeypatch):
    folder = Path(__file__).parent / "dp_attention_on_cpu"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    engine = make_engine(tp_size=2, dp_size=2, enable_dp_attention=True, dtype="float32")
    try:
        stock = generate(engine)
        with fastkernels.patch(engine, ops=["all_reduce", "ep_dispatch"]) as report:
            report.reset()
            assert ids(generate(engine)) == ids(stock)
            rows = [r for r in report.refresh().active if r.op == "ep_dispatch"]
            assert [(r.rank, r.host_class, r.modules) for r in rows] == [
                (rank, "GroupCoordinator", 1) for rank in (0, 1)
            ]
            assert all(r.calls > 0 for r in rows)
        assert ids(generate(engine)) == ids(stock)
    finally:
        engine.shutdown()
