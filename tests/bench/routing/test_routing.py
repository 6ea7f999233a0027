"""The routing that ships, of two small trained models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fk_bench.capture.replay import captured_cases
from fk_bench.kernels.judge.correctness.cases import trials
from fk_bench.routing import study

from fastkernels.core import registry


def _is_a_routing(routing: study.Routing) -> None:
    assert {c.phase for c in routing.calls} == {"prefill", "decode"}
    assert {len(c.ids) for c in routing.calls if c.phase == "decode"} == {1, 8, 32, 128}
    for call in routing.calls:
        assert call.ids.min() >= 0 and call.ids.max() < routing.experts
        ranked = np.sort(call.ids, axis=1)
        assert ranked.shape[1] == routing.top_k and (ranked[:, 1:] != ranked[:, :-1]).all()
        assert call.weights.sum(axis=1) == pytest.approx(1.0, abs=0.016)  # kept with six significant bits
        assert (call.weights[:, :-1] >= call.weights[:, 1:]).all()


@pytest.mark.parametrize(("name", "experts", "top_k", "layers"), [("e8k2", 8, 2, 6), ("e128k8", 128, 8, 4)])
def test_shipped_routing(name: str, experts: int, top_k: int, layers: int) -> None:
    found = {r.name: r for r in study.routings()}
    assert set(found) == {"small-moe-trained-e8k2", "small-moe-trained-e128k8"}
    routing = found[f"small-moe-trained-{name}"]
    assert (routing.experts, routing.top_k, routing.layers) == (experts, top_k, layers)
    _is_a_routing(routing)
    assert routing.capture.problems == []
    assert {c.text for c in routing.calls if c.phase == "prefill"} == {"prose", "code", "mixed"}
    (named,) = study.routings(routing.name)
    assert named.name == routing.name


@pytest.mark.parametrize("name", ["e8k2-at-mixtral-8x7b", "e128k8-at-qwen3-30b-a3b"])
def test_shipped_routing_at_the_sizes_of_production(name: str) -> None:
    small = {r.name: r for r in study.routings()}[f"small-moe-trained-{name.split('-at-')[0]}"]
    shape = study.shape_of(small.experts, small.top_k)
    cases = [c for c in captured_cases("fused_experts") if c.capture == f"small-moe-trained-{name}"]
    assert {c.case.dims["tokens"] for c in cases} == {len(c.ids) for c in small.calls}
    for case in cases:
        assert case.case.dims["hidden"] == shape["hidden"]
        assert case.case.dims["intermediate"] == shape["intermediate"]
        assert any(np.array_equal(case.values["topk_ids"].numpy(), c.ids) for c in small.calls)


def test_judge_replays_shipped_routing() -> None:
    small = {r.name: r for r in study.routings()}
    for op, at in (("fused_experts", 4), ("moe_align", 0)):
        here = [t for t in trials(registry.get(op), ("captured",), "cpu") if not t.gpu_only(registry.get(op))]
        assert {t.case.name.partition("/")[0] for t in here} == small.keys()
        for trial in here:
            args = trial.make("cpu", torch.Generator().manual_seed(0))
            assert args[at].dtype == torch.int32 and "ids" not in trial.case.dims
            routing = small[trial.case.name.partition("/")[0]]
            ids = args[at].numpy()
            like = [c.ids for c in routing.calls if c.ids.shape == ids.shape]
            active = {len(np.unique(c)) for c in like}
            assert (
                like
                and len(np.unique(ids)) in active
                and (ids.size < 9 or not any(np.array_equal(ids, c) for c in like))
            )
