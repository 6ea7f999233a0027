"""A repair of Inductor's scheduler on CPUs: the one change of a process that outlives an undo.

Inductor's C++ backend aligns the loops of two kernels before it fuses them, and finds their inputs again. PyTorch up to
2.13 then forgets that an op has written such an input since (pytorch/pytorch issue 185509): the fused kernel no longer
depends on that op, and may run before it. Triton's backend does not use this method.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any

import torch

log = logging.getLogger("fastkernels")
TEXT = "Inductor's scheduler for CPUs is repaired (pytorch/pytorch issue 185509); an undo leaves the repair in place"


def tracing() -> bool:
    """Whether torch.compile traces a model in this thread."""
    with suppress(AttributeError):
        return torch._guards.TracingContext.try_get() is not None
    return False


@cache
def repair() -> bool:
    """Keep compiled CPU kernels behind the ops that write what they read, in this process from now on.

    The repair is of PyTorch, not of a host, and code that was compiled with it stays in use after an undo. Where
    PyTorch's names differ, its code stays as it is. Whether it was repaired.
    """
    try:
        from torch._inductor.dependencies import StarDep, WeakDep
        from torch._inductor.scheduler import SchedulerNode
        from torch.utils._ordered_set import OrderedSet

        node: Any = SchedulerNode
        stock, config = node.recompute_size_and_body, torch.compiler.config
        config.cache_key_tag += "fastkernels-1"  # torch's caches may have code from before the repair
    except (ImportError, AttributeError) as error:
        log.debug("Inductor stays as it is: %s", error)
        return False

    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> Any:
        before: Any = getattr(self, "read_writes", None)
        found = stock(self, *args, **kwargs)
        with suppress(AttributeError, TypeError):
            order = OrderedSet(d for d in before.reads if isinstance(d, (StarDep, WeakDep)))
            self.set_read_writes(self.read_writes.with_read(order).rename(self.mutation_renames))
        return found

    node.recompute_size_and_body = recompute_size_and_body
    return True


def lasting() -> list[str]:
    """The lines of a report about changes of this process that outlive an undo."""
    return [TEXT] if repair.cache_info().currsize and repair() else []
