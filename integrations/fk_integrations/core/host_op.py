"""HostOp: what `apply` needs to know about one op in one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastkernels.core.reasons import Kind, Reason
from fk_integrations.core.journal import Journal

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Op
    from fastkernels.verify.measure import Live

# Decodes whose attention a patch measures, the most important first: graphs are captured for the longest context.
BATCHES = 1, 8, 32, 16, 64, 4


class HostOp:
    """How a host's calls of an op are measured, and how its modules get ours if only the host can change them.

    The defaults suit ops of plain modules. `op` is the functional op, whose key the shapes and sizes belong to.
    """

    # Whether the tables compare with this host's kernels: shapes that they list are not measured.
    in_tables = True

    def shape(self, op: Op, module: Any) -> tuple[Any, ...] | Reason | None:
        """Values of op.key.shape for a module's calls, as `tuning.not_faster` takes them; None: unknown."""
        return op.key.module(module) if op.key is not None and op.key.module is not None else None

    def whole_shape(self, op: Op, module: Any) -> tuple[Any, ...] | None:
        """The same without unknown values, for a measurement; None if ours cannot run or a value is unknown."""
        found = self.shape(op, module)
        return None if found is None or isinstance(found, Reason) or None in found else found

    def points(self, op: Op) -> Sequence[tuple[int, ...]]:
        """Sizes at which a patch measures the op, values of op.key.sizes; the most important ones first."""
        return op.key.points if op.key is not None else ()

    def heads(self, model: Any) -> Sequence[Any]:
        """The LM heads whose product is this op, measured as its modules are."""
        return ()

    def live(self, op: Op, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live | None:
        """The part of these modules, which have one shape, in a measurement; None: calls are made up."""
        return None

    def layers(self, op: Op, model: Any) -> Sequence[Any]:
        """The modules in which the op runs without replacing one of them alone: measured as those that it replaces."""
        return ()

    def runner(self, module: Any) -> Any:
        """The object that runs the op for a layer, if the layer's own class does not; None for any other module."""
        return None

    def serves(self, module: Any) -> bool:
        """Whether a layer of another class than the target's is replaced in the same way."""
        return False

    def swap(self, module: Any, ours: type, journal: Journal, by_table: bool) -> Reason | None:
        """Have a layer run ours; None, or why not.

        by_table: only calls that a tuned table lists as faster; all others stay the host's.
        """
        return Reason(Kind.UNSUPPORTED, "the host has no seam for this op")

    def swapped(self, module: Any) -> None:
        """Adjust a layer whose kernel object is ours now."""
