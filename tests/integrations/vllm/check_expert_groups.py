"""vLLM's own groups of two data-parallel ranks: dispatch and combine are ours in both, and the undo is exact.

vLLM's dispatch on a CPU raises NotImplementedError, so no engine runs here: groups and manager are vLLM's.
"""

import inspect
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp

TOKENS, HIDDEN, TOPK = 5, 64, 2


def tokens(rank, size=TOKENS):
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(size, HIDDEN, generator=made).to(torch.bfloat16)
    ids = torch.randint(-1, 8, (size, TOPK), generator=made, dtype=torch.int32)
    return x, torch.rand(size, TOPK, generator=made), ids


def rank_main(rank, ports, store):
    from fk_integrations.core.journal import Journal
    from fk_integrations.patching.seam_interface import Swap, find
    from fk_integrations.vllm.host import VllmAdapter
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context

    from fastkernels.overrides.expert_parallel import vllm as ours

    torch.set_num_threads(1)
    parallel = ParallelConfig(
        data_parallel_size=2, data_parallel_rank=rank, data_parallel_master_ip="127.0.0.1",
        data_parallel_master_port=ports[0], enable_expert_parallel=True,
    )  # fmt: skip
    parallel._data_parallel_master_port_list = list(ports[1:])
    config = VllmConfig(parallel_config=parallel)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        adapter = VllmAdapter(SimpleNamespace(vllm_config=config))
        (group,) = adapter.dispatchers()
        assert type(group) is CpuCommunicator and group.world_size == 2
        assert adapter.communicators() == []  # of one tensor-parallel rank
        manager = parallel_state.get_ep_group().device_communicator.all2all_manager
        seam, journal = find("dispatcher"), Journal()
        assert seam.modules(adapter, None, "ep_dispatch", CpuCommunicator) == [group]
        swap = Swap(
            adapter, group, CpuCommunicator, ours.VllmCpuExpertCommunicator, journal, op="ep_dispatch"
        )
        assert seam.swap(swap) is None and isinstance(group, CpuCommunicator)
        assert seam.modules(adapter, None, "ep_dispatch", CpuCommunicator) == [group]
        metadata = DPMetadata.make(parallel, TOKENS, torch.tensor([TOKENS, TOKENS]))
        context = ForwardContext(
            no_compile_layers={}, attn_metadata=None, slot_mapping={}, dp_metadata=metadata
        )
        with override_forward_context(context), metadata.sp_local_sizes(1):
            x, weights, ids = tokens(rank)
            extra = x.float()[:, :3].contiguous()
            for more in (None, [extra]):
                found = manager.dispatch(x, weights, ids, extra_tensors=more)
                for i, got in enumerate((*found[:3], *(found[3] if more else ()))):
                    other = tokens(1 - rank)
                    theirs = [other[0], other[1], other[2], other[0].float()[:, :3]][i]
                    mine = [x, weights, ids, extra][i]
                    assert torch.equal(got, torch.cat([mine, theirs] if rank == 0 else [theirs, mine]))
            every = [
                torch.randn(2 * TOKENS, HIDDEN, generator=torch.Generator().manual_seed(9 + r))
                for r in (0, 1)
            ]
            want = (every[0] + every[1])[rank * TOKENS : (rank + 1) * TOKENS]
            assert torch.equal(manager.combine(every[rank]), want)
            into = torch.empty(TOKENS, HIDDEN)
            assert manager.combine_into_output(every[rank], into) is into and torch.equal(into, want)
            with pytest.raises(NotImplementedError):  # of other sizes: vLLM's, which has none on a CPU
                group.all_gatherv([x], 0, [TOKENS, TOKENS + 1])
            journal.undo()
            assert type(group) is CpuCommunicator and not {
                k for k in vars(group) if k.startswith("fastkernels")
            }
            with pytest.raises(NotImplementedError):
                manager.dispatch(x, weights, ids)
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def test_both_ranks_dispatch_with_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_DIST_IDENT", "expert-groups")
    mp.spawn(rank_main, (free_ports(6), str(tmp_path / "store")), nprocs=2)


def test_signatures_are_vllms():
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    from fastkernels.overrides.expert_parallel.vllm import VllmExpertCommunicator

    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    for name in VllmExpertCommunicator.live_methods:
        theirs = getattr(DeviceCommunicatorBase, name)
        assert shape(getattr(VllmExpertCommunicator, name)) == shape(theirs), name
