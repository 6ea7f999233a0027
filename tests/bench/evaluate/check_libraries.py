"""Items in libraries, with small models on a CPU; run by test_libraries.py where the library is installed."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
from fk_bench.evaluate import suites
from fk_bench.evaluate.run.hosts import open_host
from fk_bench.evaluate.run.items import Work, calibrated, options_of
from test_requests import compared

import fastkernels

OPS = {
    "torchrec": ["embedding_bag", "cross_low_rank"],
    "torch_geometric": ["graph_propagate"],
    "ultralytics": ["conv_norm_act", "attention_dense"],
    "openfold3": [
        "attention_pair_bias",
        "triangle_multiplication",
        "swiglu_transition",
        "outer_product_mean",
    ],
}
ENTRIES = [
    e
    for e in suites.load("full").entries
    if e.item.host in OPS and importlib.util.find_spec(e.item.host) is not None
]
FLA = [e for e in suites.load("full").entries if e.item.host == "fla" and e.item.model in ("gla", "retnet")]


class Here:
    def __init__(self, entry: suites.Entry):
        self.host = open_host(options_of(entry, entry.model.small, suites.load("full"), "float32", False, 2))

    def call(self, do: str, **given: object) -> dict:
        return getattr(self.host, do)(**given) or {}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.item.host)
def test_library_item_sees_faults_and_runs_our_ops(entry: suites.Entry) -> None:
    side, work = Here(entry), Work(entry, 7, 0)
    scale = calibrated(work, side)
    assert scale.sensitive and {"residual", "scale"} <= set(scale.faults), scale
    first, again, other = (compared(side, seed) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert first.shape != other.shape or not np.allclose(first, other, rtol=1e-3)
    with fastkernels.patch(side.host.target, ops=OPS[entry.item.host]) as report:
        patched = compared(side, 3)
        rows = report.refresh().active
    assert {r.op for r in rows} == {*OPS[entry.item.host]} and all(r.calls for r in rows)
    assert work.apart(patched, first, 2) < 1e-4


@pytest.mark.skipif(importlib.util.find_spec("ultralytics") is None, reason="needs ultralytics")
@pytest.mark.parametrize("size", "nsmb")
def test_library_boxes_have_positive_sizes(size: str) -> None:
    """With random numbers of the bins, the boxes of some sizes were turned inside out, and no metric saw a fault."""
    entry = next(e for e in suites.load("full").entries if e.item.host == "ultralytics")
    small = replace(entry.model.small, arguments={**entry.model.arguments, "yaml": f"yolov10{size}.yaml"})
    side = Here.__new__(Here)
    side.host = open_host(options_of(entry, small, suites.load("full"), "float32", False, 2))
    left, top, right, bottom = compared(side, 3).reshape(-1, 6)[:, :4].T
    assert (right > left).all() and (bottom > top).all()


@pytest.mark.skipif(not (FLA and os.environ.get("TRITON_INTERPRET")), reason="in Triton's interpreter")
@pytest.mark.parametrize("kind", ["gla", "retnet"])
def test_fla_generates_what_it_scores(kind: str) -> None:
    pytest.importorskip("fla")
    small = {
        "model_type": kind, "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_heads": 2, "fuse_cross_entropy": False, "fuse_swiglu": False,
    }  # fmt: skip
    lengths = [[5, 3], [3, 2]]
    read = suites.read(
        {
            "workloads": {"w": {"kind": "text", "about": "", "throughput": 2, "lengths": lengths}},
            "models": {"m": {"category": "text", "weights": "dummy", "config": small}},
            "items": [{"model": "m", "workload": "w", "host": "fla"}],
        },
        "t",
    )
    side = open_host(options_of(read.entries[0], read.entries[0].model, read, "float32", False, 2))
    prompts = [[11, 23, 45, 67, 89], [31, 41, 59]]
    found = side.generate(prompts, [3, 2], logprobs=True)
    assert [len(t) for t in found["tokens"]] == [3, 2]
    scores = side.score(prompts, found["tokens"])["scores"]
    for mine, theirs in zip(found["logprobs"], scores, strict=True):
        assert np.allclose(mine, [own for own, _ in theirs], atol=1e-4)
        assert all(own == best for own, best in theirs)  # greedy
