"""Adapter: what `apply` needs to know about one host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastkernels.core.candidate_scopes import Scope
from fastkernels.core.reasons import Reason
from fastkernels.core.spec import OpSpec, Target
from fk_integrations.core import gated_products, versions
from fk_integrations.core.host_op import HostOp
from fk_integrations.core.journal import Journal

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Provider


def class_path(cls: type) -> str:
    """A class as Target.path names it."""
    return f"{cls.__module__}:{cls.__qualname__}"


class Adapter:
    """One host in one process. Subclassed by each host; the defaults suit plain modules.

    host           its name in Target.host
    version        of the host that runs in this process
    whole          whether this process has all layers of the model; False in a stage of a pipeline
    own            whether the model is built from our modules (our engine): rows then show all ops that run
    measured       {op: lines for the report} of our engine, which measures its kernels before any patch
    profiles_memory_later  whether the host still measures how much memory is left for its KV cache
    first_call     whether modules that no user has named decide by time, at their first calls, if ours runs
    trained        whether users train such models: calls that need gradients then run the host's code
    several        whether a process may have several such models, each with calls from outside: calls are counted
                   module by module; else see EngineCounts
    shapes_together  whether new shapes in one module mean new shapes in all: one then watches for all of them
    faster_on_cpu  whether the host's code on a CPU beats our plain PyTorch, which then goes in only when requested
    """

    host = ""
    version = ""
    whole = True
    own = False
    measured: Mapping[str, list[str]] = {}
    faster_on_cpu = False
    first_call = False
    trained = False
    several = False
    shapes_together = False
    profiles_memory_later = False

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        """The op's targets for this host's version. `model` is None before construction.

        Classes of torch, and of a host's file for one model, are listed only where the model has them.
        """
        found = [*spec.targets_for(self.host, self.version), *self.torch_targets(spec)]
        if model is None or not any(t.of_a_model for t in found):
            return found
        there = {class_path(type(m)) for m in self.modules(model)}
        return [t for t in found if not t.of_a_model or t.path in there]

    def modules(self, model: Any) -> Iterable[Any]:
        """The modules of a model in which seams look for a host's classes, each once."""
        return model.modules()  # type: ignore[no-any-return]

    def callers(self, model: Any) -> Iterable[Any]:
        """The modules, and the host's other objects, whose methods call functions that ours replace."""
        return self.modules(model)

    def compiled(self, model: Any) -> Iterable[Any]:
        """The modules inside of compiled code, whose calls run no method of theirs."""
        return ()

    def torch_targets(self, spec: OpSpec) -> list[Target]:
        """The op's targets for classes of torch.nn, which models of every host use."""
        return spec.targets_for("torch", versions.installed("torch"))

    def unknown(self, target: Target, host_class: Any) -> Reason | None:
        """None if the source of this host class is a recorded one, else why the op is off."""
        version = self.version if target.host == self.host else versions.installed(target.host) or ""
        return versions.unknown(target.host, version, target.path, host_class)

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        """{reason: modules} of modules that may compute the op, without a target."""
        return {}

    def uncovered(self, model: Any) -> dict[Reason, int]:
        """{reason: modules} of modules that no op is for, for a report that lists them; {}: not listed."""
        return {}

    def batch_invariant(self) -> str | None:
        """The host's switch that makes results independent of the batch, if it is on."""
        return None

    def captures(self) -> Callable[[], bool] | Reason | None:
        """Whether the host captures a CUDA graph now, of a host whose other steps are eager; see live.eager_steps.

        A reason: it captures none, so that modules with short calls stay with the host. None: ours run in all calls.
        """
        return None

    def providers(self) -> Mapping[str, Provider]:
        """{op: a provider that runs the host's own kernel}, for FASTKERNELS_PROVIDER=op:HOST."""
        return {}

    def scope(self) -> Scope | None:
        """The calls in which candidates of a patch run, where the host itself knows them; None: those of the patch."""
        return None

    def ranks(self) -> Any:
        """The process group, for tensors on the CPU, of the ranks that must run the same kernels; None: one process."""
        return None

    def communicators(self) -> Iterable[Any]:
        """The objects through which this process adds tensors of its tensor-parallel ranks; of several ranks only."""
        return ()

    def dispatchers(self) -> Iterable[Any]:
        """The objects through which this process sends tokens to experts of other ranks; of several ranks only."""
        return ()

    def repin(self, module: Any, journal: Journal) -> None:
        """Renew the bound method of the old class that the instance may have cached, after a change of its class."""
        pinned = vars(module).get("_forward_method")
        if pinned is None:
            return
        live: Any = type(module)
        host: Any = live.__mro__[1]
        ours, name = vars(live).get("fastkernels", live), "forward"
        if ours.forward is host.forward:  # a candidate that inherits the host's dispatcher
            name = getattr(pinned, "__name__", "")
            if getattr(ours, name, None) is getattr(host, name, None):  # and its methods
                return
        journal.set_attribute(module, "_forward_method", getattr(module, name))

    def of(self, op: str) -> HostOp:
        """The special handling of an op, by its name or that of the functional op that it is measured by."""
        return gated_products.GatedProduct() if op == gated_products.NAME else HostOp()

    def largest_batch(self) -> int | None:
        """The most tokens of a step; None: not known."""
        return None

    def has_passes(self) -> bool:
        """Whether a compiler of the host runs passes of ours on a part of the model."""
        return False

    def in_pass(self, gated: gated_products.Gated) -> bool | Reason:
        """Whether a compiler pass of ours changes the graph that has this block, or why not; False: no graph has it."""
        return False

    def prompts_in_pass(self, op: str, module: Any) -> bool:
        """Whether a compiler pass puts ours into prompts for this module, so that a swap depends on decodes alone."""
        return False

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        """Why the host, which fuses this module with its neighbours, is faster without ours; or None."""
        return None
