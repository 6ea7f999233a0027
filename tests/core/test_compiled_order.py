"""Compiled code on the CPU with ops that mutate arguments: any order that Inductor allows is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config, scheduler

from fastkernels.core import inductor_repair
from fastkernels.core.dispatch import Provider, define

ADDED = define(
    "test_added(Tensor x, Tensor(a!) total) -> Tensor",
    fake=lambda x, total: torch.empty_like(x),
    providers=(Provider("reference", lambda x, total: total.add_(x).clone(), devices=("cuda", "cpu")),),
)


def _latest_writers(nodes: list[Any]) -> list[Any]:
    """Order kernels as their dependencies allow, ops of libraries last."""
    made = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    waiting, done = sorted(nodes, key=lambda node: node.is_extern()), list[Any]()
    while waiting:
        ready = next(
            n for n in waiting if all(made.get(d.name, n) in (n, *done) for d in n.unmet_dependencies)
        )
        waiting.remove(ready)
        done.append(ready)
    return done


@pytest.mark.parametrize("dynamic", [False, True])
def test_fused_kernel_waits_for_the_op_that_writes_its_input(dynamic: bool) -> None:
    def run(x: torch.Tensor, given: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = given * 2
        before = ADDED(x, total)
        gates = torch.sigmoid(total)
        return before.sum(), (gates + bias).topk(2)[0], gates.sum()  # Inductor fuses the sigmoid and the sum

    torch.compiler.reset()
    x, given, bias = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    with config.patch(_post_fusion_custom_pass=_latest_writers):
        found = torch.compile(run, fullgraph=True, dynamic=dynamic)(x, given, bias)
    for ours, right in zip(found, run(x, given, bias), strict=True):
        torch.testing.assert_close(ours, right)
    assert inductor_repair.lasting() == [inductor_repair.TEXT]


@pytest.mark.parametrize(
    "gone",
    [
        "torch._inductor.scheduler.SchedulerNode", "torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",
        "torch._inductor.dependencies.StarDep", "torch.compiler.config",
    ],
)  # fmt: skip
def test_other_inductor_stays_as_it_is(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = scheduler.SchedulerNode
    before, tag = node.recompute_size_and_body, torch.compiler.config.cache_key_tag
    with monkeypatch.context() as without:
        without.delattr(gone)
        inductor_repair.repair.__wrapped__()
    assert node.recompute_size_and_body is before and torch.compiler.config.cache_key_tag == tag


def test_repair_passes_over_nodes_with_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = scheduler.SchedulerNode
    monkeypatch.setattr(node, "recompute_size_and_body", lambda self, *args, **kwargs: (self, args, kwargs))
    with torch.compiler.config.patch(cache_key_tag=""):  # pytest's own would hide it afterwards
        inductor_repair.repair.__wrapped__()
    assert node.recompute_size_and_body(3, 4, five=5) == (3, (4,), {"five": 5})
