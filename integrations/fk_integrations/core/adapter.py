"""What `apply` asks of a host: its adapter, and the journal of what is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.linear.linear_fp8_layers import holder_of
from fk_integrations.core import versions as compat

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Op


class Journal:
    """Undo steps, run in reverse order."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self.steps.append(step)

    def undo(self) -> None:
        while self.steps:
            self.steps.pop()()


class Adapter:
    """What a host's integration says about its modules. Subclassed by each host; the defaults suit plain modules.

    host     its name in Target.host
    version  of the host that runs in this process
    whole    whether this process has all layers of the model; False in a stage of a pipeline
    """

    host = ""
    version = ""
    whole = True

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        """The op's targets for this host's version (model: None before there is one)."""
        return spec.targets_for(self.host, self.version)

    def unknown(self, target: Target, host_class: Any) -> str | None:
        """None if the source of this host class is one that we know, else the line that says why the op is off."""
        return compat.unknown(self.host, self.version, target.path, host_class)

    def batch_invariant(self) -> str | None:
        """The host's switch that makes results independent of the batch, if it is on."""
        return None

    def repin(self, module: Any, journal: Journal) -> None:
        """After a swap of __class__: renew the method of the old class that the instance may have cached."""
        if "_forward_method" in vars(module):
            old = vars(module)["_forward_method"]
            module._forward_method = module.forward
            journal.add(lambda: setattr(module, "_forward_method", old))

    def swap_quant_method(self, module: Any, ours: type, journal: Journal) -> str | None:
        """Give a linear-like module a method object of our class, with the state of its own; None, or why not."""
        return _replace(module, "quant_method", ours, ("apply",), journal)

    def swap_scheme(self, module: Any, ours: type, journal: Journal, by_table: bool) -> str | None:
        """Give a quantized linear layer a scheme of our class, with the state of its own; None, or why not.

        by_table: only calls of which a tuned table says that ours is faster; all else runs the host's own method.
        """
        return _replace(module, "scheme", ours, ("apply_weights",), journal, by_table)

    def swap_kernel(self, module: Any, ours: type, journal: Journal) -> str | None:
        """Give a quantized linear layer a kernel object of our class, with the state of its own; None, or why not."""
        return _replace(holder_of(module), "fp8_linear", ours, ("apply_scaled_mm", "apply_weights"), journal)

    def shape(self, op: Op, module: Any) -> tuple[Any, ...] | str | None:
        """The values of op.key.shape of a module's calls of that op, as `tuned.not_faster` takes them; or why it has
        none, a line.
        """
        return op.key.module(module) if op.key is not None and op.key.module is not None else None

    def fused(self, model: Any, op: str, module: Any) -> str | None:
        """Why the host's own code of this module is faster, which the host fuses with what is around it; or None."""
        return None

    def experts(self, module: Any) -> Any:
        """Of a layer that is a mixture of experts, the object that runs them (seam 'experts'); None of any other."""
        return None

    def swap_experts(self, module: Any, ours: type, journal: Journal, by_table: bool) -> str | None:
        """Have a layer's experts run ours; None, or why not. by_table: only calls of which a tuned table says so."""
        return f"{self.host} has no seam for experts"

    def swap_attention(self, module: Any, ours: type, journal: Journal, by_table: bool) -> str | None:
        """Put our implementation behind an attention module; None, or the reason why not.

        by_table: only for the decodes of which a tuned table says that ours is faster; all else stays the host's.
        """
        return f"{self.host} has no attention seam"


def _replace(
    holder: Any, name: str, ours: type, methods: tuple[str, ...], journal: Journal, by_table: bool = False
) -> str | None:
    """Have what `holder` has by that name be of our class, with its own state; None, or why not.

    methods: those of which an instance has none of its own, unless somebody has put one in.
    """
    old = getattr(holder, name)
    if theirs := [m for m in methods if m in vars(old)]:
        return f"its {name}.{theirs[0]} was replaced by somebody else"
    new: Any = object.__new__(live_class(type(old), ours, by_table))
    vars(new).update(vars(old))
    setattr(holder, name, new)
    journal.add(lambda: setattr(holder, name, old))
    return None


_LIVE: dict[tuple[type, type, bool], type] = {}


def live_class(host_class: type, ours: type, by_table: bool = False) -> type:
    """A subclass of the host's class with our forward: constructor, loaders and isinstance checks stay the host's.

    by_table: each method is what by_table(theirs, ours) of our class makes of the two.
    """
    key = (host_class, ours, by_table)
    if key not in _LIVE:
        names = getattr(ours, "live_methods", ("forward",))
        methods = {m: getattr(ours, m) for m in {*names, *(["forward"] if hasattr(ours, "forward") else [])}}
        if by_table:
            choose = ours.by_table  # type: ignore[attr-defined]
            methods = {m: choose(getattr(host_class, m), own) for m, own in methods.items()}
        body = {
            **methods,
            "__module__": host_class.__module__,
            "__qualname__": host_class.__qualname__,
            "fastkernels": ours,
        }
        _LIVE[key] = type(host_class.__name__, (host_class,), body)
    return _LIVE[key]
