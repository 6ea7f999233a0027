"""The sum of all ranks' tensors, in every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fastkernels.core import parallel, registry
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange, words

SMALL = 2 << 20  # bytes, up to which words are sent without flags
ONE_SHOT = 8 << 20  # bytes, up to which every rank reads all of every tensor; of two ranks

BETWEEN = 64 << 10  # bytes, up to which each rank of a machine passes a whole message between machines


def reference(x: list[torch.Tensor], group: str = "tp") -> list[torch.Tensor]:
    """x: a tensor of each rank, all of one shape. Added in order of rank, in at least float32; returns x's dtype."""
    return [exchange.total(x).to(t.dtype) for t in x]


def _shared(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    parts = exchange.exchanged("all_reduce", x, group)
    return torch.add(*parts) if len(parts) == 2 else exchange.total(parts).to(x.dtype)


def _process_group(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    comm.arrive("all_reduce", x)
    out = x.clone(memory_format=torch.contiguous_format)
    with comm.naming("all_reduce"):
        dist.all_reduce(out, group=comm.process_group)
    return out


def _triton(x: torch.Tensor, group: str = "tp", shots: int = -1) -> torch.Tensor:
    x = x.contiguous()
    symmetric = exchange.symmetric_of("all_reduce", x, group)
    if shots < 0:
        shots = _shots(x, group, symmetric.size)
    if shots == 0:
        return words.sum_words(x, symmetric).view(x.shape)
    if shots == 1:
        return exchange.launch(x, symmetric, 1, True).view(x.shape)
    part = exchange.launch(x, symmetric, symmetric.size, True)
    return exchange.launch(part, symmetric, 1, False).view(x.shape)


def _shots(x: torch.Tensor, group: str, size: int) -> int:
    """0: words without flags; 1: every rank adds all of every tensor; 2: its part, then gathers."""
    if words.is_small(x, group) and x.nbytes * (size - 1) <= SMALL:
        return 0
    return 1 if x.nbytes * (size - 1) <= ONE_SHOT or x.numel() % size else 2


def _fits(params: dict[str, int], x: torch.Tensor, group: str = "tp") -> bool:
    if params["shots"] == 0:
        return words.is_small(x, group)
    return params["shots"] == 1 or x.numel() % parallel.communicator(group).size == 0


def _measured(x: torch.Tensor, group: str = "tp") -> str | None:
    """For groups in which a patch has measured these kernels."""
    if x.nbytes > parallel.communicator(group).faster.get("all_reduce", -1):
        return ForOthers("not measured to be faster in this group")
    return exchange.unsupported(x, group, 1, True)


def _over_nodes(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    """Inside each machine by ours or NCCL, between machines by the process group.

    Of a large message, each rank of a machine passes a part between the machines.
    """
    comm = parallel.communicator(group)
    nodes = comm.nodes
    assert nodes is not None
    comm.arrive("all_reduce", x)
    inside = nodes.inside
    if x.nbytes <= BETWEEN or x.numel() % inside.size:
        out = all_reduce(x, inside.name)
        dist.all_reduce(out, group=nodes.between)
        return out
    part = registry.get("reduce_scatter").op(x.reshape(-1), inside.name)
    dist.all_reduce(part, group=nodes.between)
    return registry.get("all_gather").op(part, inside.name).view(x.shape)


def _not_over_nodes(x: torch.Tensor, group: str = "tp") -> str | None:
    if parallel.communicator(group).nodes is None:
        return ForOthers("for a group over several machines with as many ranks each")
    return None if x.is_contiguous() else "the message must be contiguous"


def _of_host(x: torch.Tensor, group: str = "tp") -> torch.Tensor:
    comm = parallel.communicator(group)
    assert comm.of_host is not None
    return comm.of_host(x)


def _not_of_host(x: torch.Tensor, group: str = "tp") -> str | None:
    return None if parallel.communicator(group).of_host is not None else ForOthers("for the group of a host")


all_reduce = define(
    'all_reduce(Tensor x, str group="tp") -> Tensor',
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        exchange.alone(lambda x, group="tp": x.clone(memory_format=torch.contiguous_format)),
        exchange.shared("all_reduce", _shared),
        Provider("measured", _triton, supports=_measured),
        Provider("nodes", _over_nodes, devices=exchange.BOTH, supports=_not_over_nodes),
        Provider("of_host", _of_host, supports=_not_of_host),
        *exchange.over_group(_process_group),
        Provider(
            "triton", _triton, supports=lambda x, group="tp": exchange.unsupported(x, group, 1, True),
            params=({"shots": 0}, {"shots": 1}, {"shots": 2}), fits=_fits,
        ),
        Provider(
            "reference",
            lambda x, group="tp": exchange.total(exchange.gathered("all_reduce", x, group)).to(x.dtype),
            devices=exchange.BOTH,
        ),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="all_reduce",
    level=1,
    reference=reference,
    op=all_reduce,
    ranks="ranks",
    same_bits=True,
    arguments=(Tensor("x", "tokens hidden"), Scalar("group", default="tp")),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks - 1) * tokens * hidden",
    traffic="2 * (ranks - 1) * tokens * hidden * itemsize(dtype) / ranks",
    cases=(
        Case("decode_1", {"tokens": 1, "hidden": 4096}, weight=64, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 4096}, weight=64, tags=("model",)),
        Case("prefill_2k", {"tokens": 2048, "hidden": 4096}, weight=4, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "hidden": 8192}, weight=1, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257}, tags=("odd",)),
    ),
)
