"""The implementation that a runner calls: a candidate, one provider of ours, or a baseline, installed in its ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from fastkernels.core import candidate, registry
from fastkernels.core.baseline import Prepared
from fastkernels.core.dispatch import OPS
from fastkernels.core.spec import OpSpec
from fk_bench.kernels.judge.processes.answers import Failure, remembered

OPS_KEPT = 4  # whose baselines stay in memory


class Implementation:
    """spec: the op; cls: the class whose module is called, or None for the op's function."""

    def __init__(self) -> None:
        self.spec: OpSpec
        self.cls: type | None = None
        self.overload: Any = None  # torch's op, looked up before a candidate can put something else there
        self.baselines: dict[str, Any] = {}
        self.made: dict[str, Callable[..., Any]] = {}
        self.prepared: list[Prepared] = []  # the baselines among them that prepare weights; never a candidate
        self.production: list[str] = []  # baselines of hosts and libraries that can be tried
        self.missing: dict[str, tuple[str, ...]] = {}  # {such a baseline that is not installed: its packages}
        self.inside: Any = None  # the baseline of the op that its module calls
        self.changed: set[str] = set()  # ops with a candidate or a baseline installed
        self.building: Callable[..., Any] | None = (
            None  # of a host's module, in place of our class: see of_block
        )
        self.offered: Callable[..., Any] | None = (
            None  # the candidate's function of the op, as its file has it
        )
        self.is_candidate = False  # whether a candidate's file has the function or the class that is called
        self.device = "cpu"
        self.around: Callable[[], AbstractContextManager[Any]] = (
            nullcontext  # of a capture, as the host has it
        )
        self._blocks: Any = (
            None  # fastkernels.models.common.plans.block_tasks, if blocks of a model are judged
        )
        self._known: dict[tuple[str, str, str], Any] = {}  # baselines of ops that were loaded before

    def load_implementation(
        self, op: str, device: str, candidates: dict[str, str], against: str | None, cls: str | None,
        choice: tuple[str, dict[str, Any]] | None, model: str = "",
    ) -> None:  # fmt: skip
        """Import the op, and the candidates or (against) the baselines.

        cls     the class whose module is called; None: the op's function
        choice  (provider, parameters): use only this provider of ours
        model   text of the model whose blocks are known; see models.common.plans.block_tasks
        """
        if model:
            from fastkernels.models.common.plans import block_tasks  # an op alone needs no model

            block_tasks.register(model)
            block_tasks.place_only({})
        self._blocks = block_tasks if model else None
        for name in self.changed:  # of the previous op, in a process that serves several
            OPS[name].set_candidate(None)
        self.cls, self.baselines, self.made, self.prepared, self.changed = None, {}, {}, [], set()
        self.building, self.around, self.inside = None, nullcontext, None
        self.production, self.missing = [], {}
        self.device, self.spec = device, registry.get(op)
        self.overload = self.spec.op.overload if self.spec.op is not None else None
        found = {name: self._candidate(name, path) for name, path in candidates.items()}
        if choice is not None:
            self._only(op, *choice)
        own = found.get(op)
        self.offered = own.function if own is not None else None
        self.is_candidate = own is not None
        if self._blocks is not None:
            self._blocks.place_only({n: c.classes for n, c in found.items() if n != op})
        if cls is not None:
            self.cls = own.classes.get(cls) if own is not None else registry.op_class(op, cls)
            if self.cls is None:
                raise Failure("signature_mismatch", f"{cls} is not a class once the file is imported")
        elif own is not None and own.function is None:
            raise Failure("signature_mismatch", f"{op} is not a function once the file is imported")
        if against is not None:
            self._find_baselines(against)

    def _candidate(self, name: str, path: str) -> candidate.Candidate:
        try:
            found = candidate.load(name, path)
        except candidate.NothingOffered as error:
            raise Failure("signature_mismatch", str(error)) from None
        except candidate.CandidateError as error:
            raise Failure("compile_error", str(error)) from None
        if found.function is not None and (op := OPS.get(name)) is not None:
            try:
                function, supports = candidate.fit(found.function, op)
            except candidate.CandidateError as error:
                raise Failure("signature_mismatch", str(error)) from None
            self._put(name, function if supports is None else _strict(function, supports), "candidate")
        return found

    def _only(self, op: str, name: str, params: dict[str, Any]) -> None:
        """Run only this provider of ours, with these parameters; calls that it does not support fail."""
        provider = next(p for p in OPS[op].providers if p.name == name).bound(params)

        def fn(*args: Any) -> Any:
            if provider.supports is not None and (reason := provider.supports(*args)) is not None:
                raise Failure("unsupported", f"{name}: {reason}")
            return provider.fn(*args)

        self._put(op, fn, name)

    def _find_baselines(self, against: str) -> None:
        """Find the op's baselines; for a module, install the first available one of each op that it calls.

        Those of the last ops are kept, workspaces included: `fk-bench tune` judges a model's ops in turn.
        """
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # libraries that autotune do so once per shape
        from fk_bench.core.baselines import baselines, of_block, production

        def there(name: str) -> list[Any]:
            found = baselines(name, against, self.device)
            theirs = production(found)
            self.missing |= theirs.missing
            self.production += theirs.usable
            return [b for b in found if b.available() is None and (b.graph or self.device == "cpu")]

        if self.cls is None:
            key = self.spec.name, against, self.device
            known: tuple[dict[str, Any], dict[str, Callable[..., Any]], list[Prepared]]
            here = {b.name: b for b in there(self.spec.name)}
            known = self._known.pop(key, None) or (here, {}, [])
            self._known[key] = self.baselines, self.made, self.prepared = known
            for old in list(self._known)[:-OPS_KEPT]:
                del self._known[old]
            return
        names = []
        own = self.spec.op is not None
        for name in [self.spec.name] if own else sorted(registry.reached(self.spec.name, parts=True)):
            usual = {b.name for b in registry.baselines(name)} | {"reference"}
            for b in there(name) if name in OPS else ():
                if b.name in usual and self._made(name, b):
                    names.append(f"{name}={b.name}")
                    break
        self.baselines = {"our module on " + ", ".join(names): None}
        if candidate.is_block(self.spec.name) and against != "reference":
            theirs = of_block(self.spec.name, self.device)
            if against == "host" and any(b.modules for b in theirs):  # without modules it only has a reason
                self.baselines = {}
            self.baselines |= {b.name: b for b in theirs}

    def _made(self, op: str, baseline: Any) -> bool:
        """Whether a baseline could be made and installed."""
        try:
            fn = self._ready(baseline)
        except Exception:  # another version of the library: try the next baseline
            return False
        self._put(op, fn, baseline.name, remembered(baseline.supports))
        if op == self.spec.name:
            self.inside = baseline
        return True

    def use(self, baseline: str, args: list[Any] | None) -> dict[str, Any]:
        """Use this baseline from now on; reports why if it does not support the case's arguments `args`."""
        chosen, self.building, self.around = self.baselines.get(baseline), None, nullcontext
        called = self.inside if chosen is None else chosen
        if args is not None and called is not None and (reason := called.fails(*args)) is not None:
            return {"unsupported": reason}
        if chosen is None:  # a module on installed baselines, or another candidate
            return {"prepares": bool(self.prepared)}
        if args is not None and (reason := chosen.supports(*args)) is not None:
            return {"unsupported": reason}
        if baseline not in self.made:
            self.made[baseline] = self._ready(chosen)
        if self.cls is not None:
            self.building = self.made[baseline]
            return {"unchecked": chosen.unchecked}
        self._put(self.spec.name, self.made[baseline], baseline)
        self.around = getattr(self.made[baseline], "capturing", nullcontext)
        return {"unchecked": chosen.unchecked, "prepares": bool(chosen.prepares)}

    def _ready(self, baseline: Any) -> Callable[..., Any]:
        fn: Callable[..., Any] = baseline.ready()
        if isinstance(fn, Prepared):
            self.prepared.append(fn)
        return fn

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Calls in this context prepare weights, if the baseline does; they are neither captured nor timed."""
        with ExitStack() as stack:
            for fn in self.prepared:
                stack.enter_context(fn.renewed())
            yield

    @contextmanager
    def placed(self) -> Iterator[dict[str, int]]:
        """The calls of candidates for blocks inside a block of a higher level, {block: calls}, at the end."""
        if self._blocks is None:
            yield {}
            return
        with self._blocks.counting() as calls:
            yield calls

    def _put(
        self, op: str, fn: Callable[..., Any], label: str, supports: Callable[..., str | None] | None = None
    ) -> None:
        OPS[op].set_candidate(fn, label, supports)
        self.changed.add(op)


def _strict(function: Callable[..., Any], supports: Callable[..., str | None]) -> Callable[..., Any]:
    """The function, which fails in unsupported calls: no other provider may take them."""

    def run(*args: Any) -> Any:
        if (reason := supports(*args)) is not None:
            raise Failure("signature_mismatch", reason)
        return function(*args)

    return run
