"""Ranks and collectives of the tensor-parallel group that standalone modules shard over.

Without a process group the group is rank 0 of 1 and every collective is the identity. `init` uses
torch.distributed (NCCL on CUDA, gloo on the CPU); `bind` takes a host's own group instead. Functional ops of the family
`collective` find a group's buffers and process group by its name: `communicator`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from fastkernels.core import multicast, registry
from fastkernels.core.communicator import TIMEOUT_S, Communicator, Nodes

TP = "tp"  # the name of the group that modules are sharded over
EP = "ep"  # of data-parallel ranks, which share the experts of mixtures


@dataclass(frozen=True)
class Group:
    """A tensor-parallel group. all_reduce(t) sums and may write into t; all_gather(t, dim) concatenates by rank.

    communicator  of a group of torch.distributed; None for one that a host has bound
    """

    rank: int
    size: int
    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    all_gather: Callable[[torch.Tensor, int], torch.Tensor]
    communicator: Communicator | None = None


_SINGLE = Group(0, 1, lambda t: t, lambda t, dim: t)
_group: Group = _SINGLE
_alone = Communicator(TP)
_sharing: Communicator | None = None  # EP, while this process is a data-parallel rank
_communicators: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
_build_as: ContextVar[tuple[int, int, int] | None] = ContextVar("build_as", default=None)
_data: ContextVar[tuple[int, int]] = ContextVar("data", default=(0, 1))


def bind(
    rank: int,
    size: int,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    all_gather: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """Shard modules built from now on over this group, and use its collectives in all modules.

    Raises ValueError for a rank that is not in 0 .. size - 1.
    """
    _check(rank, size)
    _use(Group(rank, size, all_reduce, all_gather))


def _use(group: Group) -> None:
    """Use this group from now on, and leave the last one."""
    global _group
    if _group.communicator is not None:
        _communicators.pop(_group.communicator.name, None)
        _group.communicator.close()
    _group = group


def _check(rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of size {size}: it must be 0 to {size - 1}")


def reset() -> None:
    """Return to rank 0 of 1, and free the groups' buffers. A process group of torch.distributed is not touched."""
    global _sharing
    _use(_SINGLE)
    if _sharing is not None:
        _sharing.close()
        _sharing = None


def release() -> None:
    """After the end of a rank: let kernels of its groups that wait for it go on, see Symmetric.release."""
    for communicator in (_group.communicator, _sharing):
        if communicator is not None and communicator.symmetric is not None:
            communicator.symmetric.release()


@contextmanager
def build_as(rank: int, size: int, experts: int = 1, data: tuple[int, int] = (0, 1)) -> Iterator[None]:
    """Build modules of `rank` in this thread, whatever group is bound; collectives still use the bound group.

    experts  groups of ranks that have different experts; 1: each rank has a shard of every expert
    data     (rank, size) of the data-parallel ranks, each of which is such a group: it has all modules and a part of
             every mixture's experts
    Raises ValueError for a rank that is not in 0 .. size - 1.
    """
    _check(rank, size)
    _check(*data)
    token, of_data = _build_as.set((rank, size, experts)), _data.set(data)
    try:
        yield
    finally:
        _build_as.reset(token)
        _data.reset(of_data)


def init(
    rank: int,
    size: int,
    init_method: str | dist.Store = "env://",
    device: str = "cpu",
    timeout: float = TIMEOUT_S,
    memory: int | None = None,
) -> None:
    """Join a torch.distributed group of `size` processes (unless this process is in one) and bind it.

    device: 'cuda' (or 'cuda:1') takes NCCL, 'cpu' gloo. init_method: as in torch.distributed.init_process_group, or a
    store. timeout: seconds that a rank may be late in a collective before the others raise. memory: as in Communicator.
    Raises ValueError where an existing process group has another rank or size.
    """
    if size == 1:
        reset()
        return
    _enter(rank, size, init_method, device, timeout)
    bind_process_group(device=device, timeout=timeout, memory=memory)


def init_sharing(
    rank: int,
    size: int,
    init_method: str | dist.Store,
    device: str = "cpu",
    timeout: float = TIMEOUT_S,
    tensor: int = 1,
) -> Communicator:
    """The same for data-parallel ranks of `tensor` neighbouring processes each. Returns the group `ep`.

    Processes of one data-parallel rank form the group `tp`. Those in the same place of all of them form `ep`.
    """
    global _sharing
    reset()
    _enter(rank, size, init_method, device, timeout)
    across = None
    if tensor > 1:
        inside = [range(first, first + tensor) for first in range(0, size, tensor)]
        bind_process_group(_own_group(rank, inside), device, timeout)
        across = _own_group(rank, [range(place, size, tensor) for place in range(tensor)])
    _sharing = join(EP, rank // tensor, size // tensor, across, device, timeout)
    return _sharing


def _own_group(rank: int, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The process group of the part that has `rank`. All processes must call this: NCCL splits a group in all ranks."""
    made = [dist.new_group(list(part)) for part in parts]
    return next(group for group, part in zip(made, parts, strict=True) if rank in part)


def _enter(rank: int, size: int, init_method: str | dist.Store, device: str, timeout: float) -> None:
    """Join the process group of torch.distributed, unless this process is in it."""
    if not dist.is_initialized():
        multicast.turn_off()
        cuda = device.startswith("cuda")
        # With an index NCCL connects now instead of in the first collective, which may be inside a graph capture.
        now: dict[str, Any] = {"device_id": torch.device(device)} if cuda and ":" in device else {}
        name = "init_method" if isinstance(init_method, str) else "store"
        more: dict[str, Any] = {name: init_method, **now}
        dist.init_process_group(
            "nccl" if cuda else "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **more
        )
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        found = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise ValueError(f"torch.distributed is already initialized as {found}, not as rank {rank} of {size}")


def bind_process_group(
    process_group: dist.ProcessGroup | None = None,
    device: str | None = None,
    timeout: float = TIMEOUT_S,
    memory: int | None = None,
) -> None:
    """Bind a torch.distributed group of this process (None: the default group). All its ranks must call this.

    device: of the tensors; None: 'cuda' for NCCL, else 'cpu'. timeout, memory: as in `init`.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    device = device or ("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
    made = join(TP, rank, size, process_group, device, timeout, memory)
    reduce, gather = registry.get("all_reduce").op, registry.get("all_gather").op
    in_place = device.startswith("cuda")

    def all_reduce(t: torch.Tensor) -> torch.Tensor:
        if in_place and not reduce.requested:  # NCCL needs no copy
            dist.all_reduce(t, group=process_group)
            return t
        return reduce(t, TP)

    def all_gather(t: torch.Tensor, dim: int) -> torch.Tensor:
        parts = gather(t, TP)
        if dim % t.dim() == 0:
            return parts
        shape = list(t.shape)
        shape[dim] *= size
        return parts.view(size, *t.shape).movedim(0, dim % t.dim()).reshape(shape)

    _use(Group(rank, size, all_reduce, all_gather, made))
    _communicators[TP] = made  # behind the last group's, which had the same name


def join(
    name: str,
    rank: int,
    size: int,
    process_group: dist.ProcessGroup | None = None,
    device: str = "cpu",
    timeout: float = TIMEOUT_S,
    memory: int | None = None,
) -> Communicator:
    """Return a new communicator, which collective ops find by its name while it is referenced.

    All ranks of the group must call this. Raises ValueError for a rank that is not in 0 .. size - 1. If the ranks are
    on several machines, with as many neighbouring ranks on each, those of a machine form a group of their own, too.
    """
    _check(rank, size)
    made = Communicator(name, rank, size, process_group, device, memory, timeout=timeout)
    _communicators[name] = made
    each = _ranks_of_a_machine(made.machines)
    if each > 1:
        every = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        first, place = rank // each * each, rank % each
        if size == dist.get_world_size():
            inside = _own_group(every[rank], [every[at : at + each] for at in range(0, size, each)])
            between = _own_group(every[rank], [every[at::each] for at in range(each)])
        else:  # processes outside of this group do not come here
            inside = dist.new_group(every[first : first + each], use_local_synchronization=True)
            between = dist.new_group(every[place::each], use_local_synchronization=True)
        own = join(f"{name}/inside", place, each, inside, device, timeout)
        made.nodes = Nodes(own, between)
    return made


def _ranks_of_a_machine(machines: list[str]) -> int:
    """How many neighbouring ranks each of several machines has; 0 for one machine, or if they differ."""
    count = len(set(machines))
    if count < 2 or len(machines) % count:
        return 0
    each = len(machines) // count
    parts = [set(machines[at : at + each]) for at in range(0, len(machines), each)]
    return each if all(len(part) == 1 for part in parts) else 0


def communicator(name: str = TP) -> Communicator:
    """The group of this name; without a group of ranks, `tp` is rank 0 of 1. Raises ValueError for an unknown name."""
    found = _communicators.get(name)
    if found is None:
        if name != TP:
            known = ", ".join(sorted({TP, *_communicators}))
            raise ValueError(
                f"there is no group {name!r} of ranks, only {known}: call parallel.join in all ranks"
            )
        return _alone
    return found


def get_tp_rank() -> int:
    """The rank that a module built now belongs to."""
    found = _build_as.get()
    return _group.rank if found is None else found[0]


def get_tp_size() -> int:
    """The number of ranks that a module built now is sharded over."""
    found = _build_as.get()
    return _group.size if found is None else found[1]


def get_ep_size() -> int:
    """The number of groups of ranks that a mixture of experts built now is sharded over."""
    found = _build_as.get()
    return 1 if found is None else found[2]


def get_data_rank() -> tuple[int, int]:
    """(rank, size) of the data-parallel ranks that a module built now belongs to."""
    return _data.get()


def all_reduce(t: torch.Tensor) -> torch.Tensor:
    """The sum of t over the ranks; t itself may be overwritten with it."""
    return t if _group.size == 1 else _group.all_reduce(t)


def all_gather(t: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The ranks' tensors (all of t's shape) concatenated along `dim`, in order of rank.

    Gathered logits let every rank sample the same tokens without further communication.
    """
    return t if _group.size == 1 else _group.all_gather(t, dim)


def divide(total: int, parts: int, what: str) -> int:
    """total / parts. Raises ValueError that says what cannot be divided."""
    if total % parts:
        raise ValueError(f"{what} {total} cannot be divided over {parts} ranks")
    return total // parts
