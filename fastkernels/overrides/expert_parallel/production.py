"""Baselines of this family: the parts of each op one after the other, and vLLM's default exchange.

vLLM's `allgather_reducescatter` collects the tokens of all ranks by one group of NCCL calls, and adds the results back
by a reduce-scatter. Each rank's own part of the tokens, which the ops return, is selected behind it.
"""

from __future__ import annotations

from functools import partial

from fastkernels.core import parallel
from fastkernels.core.baseline import Baseline, Function, provider, refusing
from fastkernels.overrides.expert_parallel.ep_combine import placed
from fastkernels.overrides.expert_parallel.ep_dispatch import Dispatched, own_part
from fastkernels.overrides.kit.libraries import GPU_AND_CPU, T, pynccl_of

NO_DEEPEP = (
    "its calls have another result, such as padded rows in an order of experts, and it was not tried here"
)
OPS = (
    "ep_combine",
    "ep_combine_batched",
    "ep_dispatch",
    "ep_dispatch_batched",
    "ep_dispatch_batched_fp8",
    "ep_dispatch_fp8",
)


def _all_gather() -> Function:
    of = pynccl_of()

    def ep_dispatch(
        x: T, topk_ids: T, topk_weights: T, num_experts: int, group: str = parallel.TP
    ) -> Dispatched:
        comm, nccl = parallel.communicator(group), of(group)
        given = [t.contiguous() for t in (x, topk_ids, topk_weights)]
        every = [t.new_empty((comm.size * t.shape[0], *t.shape[1:])) for t in given]
        nccl.group_start()
        for into, t in zip(every, given, strict=True):
            nccl.all_gather(into, t)
        nccl.group_end()
        return own_part(every, num_experts, comm.rank, comm.size)

    return ep_dispatch


def _reduce_scatter() -> Function:
    of = pynccl_of()

    def ep_combine(x: T, source: T, group: str = parallel.TP) -> T:
        size = parallel.communicator(group).size
        out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        of(group).reduce_scatter(out, placed(x, source))
        return out

    return ep_combine


_VLLM = {"ep_combine": _reduce_scatter, "ep_dispatch": _all_gather}

BASELINES: dict[str, tuple[Baseline, ...]] = {
    op: (
        Baseline("composed", "host", partial(provider, op, "composed"), devices=GPU_AND_CPU),
        *((Baseline("vllm", "host", _VLLM[op], ("vllm",)),) if op in _VLLM else ()),
        refusing("deepep", NO_DEEPEP),
    )
    for op in OPS
}
