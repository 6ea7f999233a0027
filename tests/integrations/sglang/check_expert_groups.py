"""SGLang's own group of two ranks: tokens are collected and divided by ours, next to its sums, and undo is exact.

Data-parallel attention does not run on a CPU (it needs pinned memory), so no engine runs here.
"""

import inspect
import os
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp


def rank_main(rank, store):
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from fk_integrations.core.journal import Journal
    from fk_integrations.patching.seam_interface import Swap, find
    from fk_integrations.sglang.scheduler import SglangAdapter
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from fastkernels.overrides.collective.sglang import SGLangGroupCoordinator
    from fastkernels.overrides.expert_parallel.sglang import SGLangExpertCoordinator

    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
    made = GroupCoordinator([[0, 1]], rank, "gloo", False, False, False, False, False, False, group_name="tp")
    parallel_state.get_tp_group = lambda: made
    runner = SimpleNamespace(server_args=SimpleNamespace(pp_size=1, enable_dp_attention=True))
    adapter = SglangAdapter(runner)
    (group,) = adapter.dispatchers()
    assert type(group) is GroupCoordinator and adapter.communicators() == [group]
    runner.server_args.enable_dp_attention = False
    assert adapter.dispatchers() == []
    runner.server_args.enable_dp_attention = True

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)
    whole = torch.randn(10, 64, generator=torch.Generator().manual_seed(7 + rank))

    def results():
        every, part = x.new_empty(10, 64), torch.empty(5, 64)
        group.all_gather_into_tensor(every, x)
        group.reduce_scatter_tensor(part, whole)
        return every, part, group.all_reduce(whole.clone()).clone()

    stock, journal = results(), Journal()
    for name, cls, op in (
        ("communicator", SGLangGroupCoordinator, "all_reduce"),
        ("dispatcher", SGLangExpertCoordinator, "ep_dispatch"),
    ):
        seam = find(name)
        assert seam.modules(adapter, None, op, GroupCoordinator) == [group]
        assert seam.swap(Swap(adapter, group, GroupCoordinator, cls, journal, op=op)) is None
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        assert getattr(type(group), name) is not getattr(GroupCoordinator, name)
    for got, want in zip(results(), stock, strict=True):
        assert torch.equal(got, want)
    journal.undo()
    assert type(group) is GroupCoordinator and not {k for k in vars(group) if k.startswith("fastkernels")}
    for got, want in zip(results(), stock, strict=True):
        assert torch.equal(got, want)
    parallel_state.destroy_distributed_environment()


def test_both_ranks_collect_with_ours(tmp_path):
    mp.spawn(rank_main, (str(tmp_path / "store"),), nprocs=2)


def test_signatures_are_sglangs():
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from fastkernels.overrides.expert_parallel.sglang import SGLangExpertCoordinator

    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    for name in SGLangExpertCoordinator.live_methods:
        assert shape(getattr(SGLangExpertCoordinator, name)) == shape(getattr(GroupCoordinator, name)), name
