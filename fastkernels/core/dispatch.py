"""Functional ops, torch.ops.fastkernels.NAME, and the choice of the provider that runs a call.

Order of preference: candidate, FASTKERNELS_PROVIDER=op:name, the chip's tuned table (tuning.py: the user's, verified
choices, the shipped one), the op's own list.
Providers that are unavailable on the device are skipped. A provider that does not support the case is skipped too; this
fallback is counted and logged once, and is an error under FASTKERNELS_STRICT=1. A call is one run of the op's body: the
replay of a CUDA graph runs no body.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from threading import RLock, get_ident
from typing import Any

import torch

from fastkernels.core import candidate_scopes, inductor_repair, registry
from fastkernels.core import tuning as tuned
from fastkernels.core.candidate_scopes import Installed, Scope
from fastkernels.core.counters import Counters, UnsupportedCase
from fastkernels.core.env import Environment
from fastkernels.core.tuning import Key

log = logging.getLogger("fastkernels")
LIBRARY = torch.library.Library("fastkernels", "FRAGMENT")
# True: compiled code calls `Op.overload` alone, by which a host's compiler passes find our ops.
only_overload = False
OPS: dict[str, Op] = {}
PLAIN = ("torch", "reference")  # providers without a kernel of ours
_around: Callable[[Choice, Provider], Provider] | None = None
_direct: set[int] = set()  # threads; see direct_calls


class ForOthers(str):
    """A reason of `supports` that is no fallback: the provider is for other calls, the next ones for these."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    fn        takes the op's arguments, mutates what the op mutates and returns what the op returns
    devices   device types ('triton' also runs on 'cpu' under TRITON_INTERPRET=1)
    module    an importable module that it needs, e.g. 'flash_attn_interface'; of a tuple, any one
    missing   missing() -> None, or the reason why this machine lacks what it needs, such as a compiler
    supports  supports(*args) -> None, or the reason why the case is unsupported; must not synchronize. A call with the
              reason ForOthers(...) goes to the next provider without counting as a fallback
    params    sets of keyword arguments that `fn` takes after the op's own (tile sizes, splits). `fk-bench tune` chooses
              among them; without any, the kernel chooses itself
    fits      fits(params, *args) -> whether `fk-bench tune` measures this set for calls like this one
    checks    whether `supports` takes the parameters, too, after the op's arguments
    out       whether `fn` takes `out`, contiguous memory for the result, and returns it after writing there. For an op
              that mutates arguments, `out` is a tuple for their new values
    twin      name of a provider with much the same kernel from another library. Where that library is missing, tuned
              tables that name it mean this provider
    """

    name: str
    fn: Callable[..., Any]
    devices: tuple[str, ...] = ("cuda",)
    module: str | tuple[str, ...] | None = None
    missing: Callable[[], str | None] | None = None
    supports: Callable[..., str | None] | None = None
    params: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    fits: Callable[..., bool] | None = None
    checks: bool = False
    out: bool = False
    twin: str | None = None

    def bound(self, params: Mapping[str, Any] | None) -> Provider:
        """Return this provider with these parameters in every call."""
        if not params:
            return self
        supports = (
            partial(self.supports, **params) if self.checks and self.supports is not None else self.supports
        )
        return replace(self, fn=partial(self.fn, **params), supports=supports)

    def unavailable(self, device: str) -> str | None:
        """Return why this provider cannot run here on that device type; None if it can."""
        interpreted = self.name == "triton" and device == "cpu" and Environment.read().interpret
        if device not in self.devices and not interpreted:
            return f"{self.name} runs on {', '.join(self.devices)}, not on {device}"
        wanted = (self.module,) if isinstance(self.module, str) else self.module or ()
        if wanted and not any(map(installed, wanted)):
            return f"{self.name} needs {' or '.join(wanted)}, which is not installed"
        return None if self.missing is None else self.missing()


def installed(module: str) -> bool:
    """Whether a module is installed. Imports neither it nor its parents, unlike importlib.util.find_spec.

    A folder of that name without an __init__.py does not count.
    """
    path: Sequence[str] | None = None
    for i, name in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:i]) if path is None else name, path)
        if spec is None or (i == len(parts) and spec.origin is None):
            return False
        path = spec.submodule_search_locations or ()
    return True


_changes = RLock()  # of candidates: models are patched in several threads, and may be collected meanwhile
_Place = str | tuple[str, Installed]  # a device type, with the candidate of the calls if they have one


@dataclass
class Choice(Counters):
    """Which provider of an op runs a call: the order of providers, the chip's table, and the user's requests.

    key        how to look a call up in a tuned table; None for an op without a table
    installed  the candidates of all models of the process; see candidate_scopes
    """

    providers: tuple[Provider, ...]
    key: Key | None = None
    installed: list[Installed] = field(default_factory=list, kw_only=True)
    _order: dict[_Place, list[Provider]] = field(default_factory=dict, kw_only=True)
    _tuned: dict[_Place, tuned.Lookup[list[Provider] | None]] = field(default_factory=dict, kw_only=True)
    _faster: dict[str, tuned.Lookup[Provider | None]] = field(default_factory=dict, kw_only=True)
    _wanted: str | None = field(default=None, kw_only=True)
    _requested: str | None = field(default=None, kw_only=True)

    def order(self, device: str) -> list[tuple[Provider, str | None]]:
        """All providers in order of preference, each with the reason why it is unavailable, or None."""
        return self._ordered(device, self.candidate)

    def _ordered(self, device: str, candidate: Provider | None) -> list[tuple[Provider, str | None]]:
        wanted = Environment.read().provider.get(self.name)
        names = [p.name for p in self.providers]
        if wanted is not None and wanted not in names:
            raise ValueError(
                f"FASTKERNELS_PROVIDER: {self.name} has no provider {wanted!r}, it has {', '.join(names)}"
            )
        first = [] if candidate is None else [candidate]
        chosen = [p for p in self.providers if p.name == wanted]
        rest = [p for p in self.providers if p.name != wanted]
        return [(p, p.unavailable(device)) for p in (*first, *chosen, *rest)]

    @property
    def candidate(self) -> Provider | None:
        """The candidate that a call in this thread would run now."""
        found = candidate_scopes.of_call(self.name, self.installed) if self.installed else None
        return None if found is None else found.provider

    def installation(
        self,
        fn: Callable[..., Any],
        label: str,
        supports: Callable[..., str | None] | None = None,
        scope: Scope | None = None,
        file: str = "",
    ) -> Installed:
        """A candidate for `install`, made before it, so that its undo can be noted first; see Installed."""
        return Installed(Provider(label, fn, ("cuda", "cpu"), supports=supports), file or label, scope)

    def install(self, found: Installed) -> None:
        """Run a candidate before our providers, in the calls of its scope that it supports."""
        with _changes:
            self._hold([*self.installed, found])

    def remove(self, found: Installed) -> None:
        """Undo `install`, before or after others of this op. Safe to repeat."""
        with _changes:
            if found in self.installed:
                self._hold([one for one in self.installed if one is not found])

    def set_candidate(
        self,
        fn: Callable[..., Any] | None,
        label: str = "candidate",
        supports: Callable[..., str | None] | None = None,
    ) -> None:
        """Run `fn` before our providers in all calls that `supports` accepts; None removes all candidates."""
        with _changes:
            self._hold([] if fn is None else [self.installation(fn, label, supports)])

    def _hold(self, installed: list[Installed]) -> None:
        candidate_scopes.note(self.name, installed)
        self.installed = installed
        self.forget()

    def _place(self, device: str) -> _Place:
        found = candidate_scopes.of_call(self.name, self.installed) if self.installed else None
        return device if found is None else (device, found)

    def _pick(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Provider:
        """Count the call and return its provider. Raises UnsupportedCase."""
        self.calls += 1
        place = self._place(device)
        order = self._order.get(place) or self._resolve(place)
        if place in self._tuned:
            order = self._chosen(place, args, kwargs) or order
        fell_back = False
        for provider in order:
            supports = provider.supports
            reason = None if supports is None else supports(*args, **kwargs)
            if reason is None:
                if fell_back and provider.name in PLAIN:
                    self.plain += 1
                return provider
            if not isinstance(reason, ForOthers) or provider.name == self._wanted:
                self.note(f"{provider.name}: {reason}")
                fell_back = True
        raise UnsupportedCase(f"{self.name}: no provider supports this case on {device}: {self.fallbacks}")

    def _resolve(self, place: _Place) -> list[Provider]:
        device, candidate = (place, None) if isinstance(place, str) else (place[0], place[1].provider)
        self._strict = Environment.read().strict
        order = self._ordered(device, candidate)
        wanted = self._wanted = Environment.read().provider.get(self.name)
        for provider, reason in order:
            if provider.name == wanted and reason is not None:
                self.note(reason)
        found = [provider for provider, reason in order if reason is None]
        if not found:
            raise UnsupportedCase(
                f"{self.name}: no provider on {device}: " + "; ".join(r or "" for _, r in order)
            )
        around = _around
        run = found if around is None else [around(self, provider) for provider in found]
        first_count = sum(p is candidate or p.name == wanted for p in found)  # before any table
        if self.key is not None and not (first_count and found[0].supports is None):
            self._read_tuned(place, device, found, run, first_count)
        self._order[place] = run
        return run

    def _read_tuned(
        self, place: _Place, device: str, found: list[Provider], run: list[Provider], first_count: int
    ) -> None:
        """Make the order of providers for each entry of the chip's table. Raises TableError."""
        assert self.key is not None
        table = tuned.entries(self.name, tuned.chip_of(device))
        if not table:
            return
        around, absent = _around, set()

        def order(entry: tuned.Entry) -> list[Provider] | None:
            chosen = self._provider_of(entry)
            if chosen is None:
                return None
            if chosen not in found and (other := [p for p in found if p.twin == entry.provider]):
                chosen = other[0]
            if chosen not in found:
                absent.add(chosen.unavailable(device))
                return None
            bound = chosen.bound(entry.params)
            first = bound if around is None else around(self, bound)
            rest = [r for p, r in zip(found[first_count:], run[first_count:], strict=True) if p is not chosen]
            return [*run[:first_count], first, *rest]

        self._tuned[place] = tuned.lookup(self.key, table).map(order)
        for reason in absent:
            log.warning("%s: a tuned table names an unavailable provider: %s", self.name, reason)

    def _provider_of(self, entry: tuned.Entry) -> Provider | None:
        if entry.provider is None:
            return None
        provider = next((p for p in self.providers if p.name == entry.provider), None)
        known = {name for params in (provider.params if provider else ()) for name in params}
        if provider is None or not known.issuperset(entry.params):
            names = ", ".join(p.name for p in self.providers)
            takes = (
                f"takes {', '.join(sorted(known)) or 'no parameters'}"
                if provider
                else f"is not one of {names}"
            )
            raise tuned.TableError(
                f"{entry.source}: {entry}: {entry.provider} {takes}; `fk-bench tune {self.name}` writes the table again"
            )
        return provider

    def _chosen(self, place: _Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Provider] | None:
        """The order of providers for this call by the table; None if it has no entry."""
        assert self.key is not None
        return self._tuned[place].find(*self.key.of(*args, **kwargs))

    def faster(self, *args: Any) -> bool:
        """Whether the chip's table names an available provider that supports this call and beats production.

        Runs and counts nothing, and ignores explicit requests (see `requested`). Raises TableError.
        """
        if self.key is None:
            return False
        provider = self.winner(args[0].device.type, *self.key.of(*args))
        return provider is not None and (provider.supports is None or provider.supports(*args) is None)

    def winner(self, device: str, shape: tuple[Any, ...], sizes: tuple[int, ...]) -> Provider | None:
        """Return the available provider that beats production for calls of this key, by the chip's table.

        For seams that know the key before they have the op's arguments. Reads no tensor. Raises TableError.
        """
        found = self._faster.get(device)
        if found is None:
            assert self.key is not None
            table = tuned.entries(self.name, tuned.chip_of(device))
            found = tuned.lookup(self.key, table).map(lambda entry: self._winner(entry, device))
            self._faster[device] = found
        return found.find(shape, sizes)

    def _winner(self, entry: tuned.Entry, device: str) -> Provider | None:
        provider = self._provider_of(entry) if entry.faster else None
        return provider if provider is not None and provider.unavailable(device) is None else None

    @property
    def requested(self) -> str:
        """The user's explicit request: 'off' (FASTKERNELS_DISABLE), 'named' (a candidate, a provider, or a recording of
        all ops), or ''. A fusion replaces only ops without a request.
        """
        if self._requested is None:
            env = Environment.read()
            named = self.name in env.provider or _around is not None
            self._requested = "off" if self.name in env.disable else "named" if named else ""
        if self.installed and not self._requested:  # of any model, where code is compiled
            return "named" if torch.compiler.is_dynamo_compiling() or self.candidate is not None else ""
        return self._requested

    def reset(self) -> None:
        """Set the counters to zero and read the order of providers from the environment again."""
        self.clear()
        self.forget()

    def forget(self) -> None:
        """Drop cached providers and table look-ups; the next call finds them again."""
        self._order.clear()
        self._tuned.clear()
        self._faster.clear()
        self._requested = None


@dataclass
class Op(Choice):
    """A functional op, torch.ops.fastkernels.NAME, and the ways to call it.

    overload    the torch op
    functional  for an op that mutates arguments: the torch op that returns their new values instead
    unchanging  for an op that mutates only arguments that may be None: (their positions, the torch op of compiled calls
                in which all of them are). Inductor of torch 2.13 cannot compile `overload` for these
    fake        the op's shape function
    """

    overload: Any = None
    fake: Callable[..., Any] | None = None
    functional: Callable[..., Any] | None = None
    unchanging: tuple[tuple[int, ...], Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if _direct and not torch.compiler.is_dynamo_compiling() and get_ident() in _direct:
            return self.run(*args)
        if self.unchanging is None or only_overload:
            return self.overload(*args)
        if not torch.compiler.is_dynamo_compiling():
            return self.overload._op(*args)  # what its __call__ calls
        positions, overload = self.unchanging
        if all(i >= len(args) or args[i] is None for i in positions):
            return overload(*args)
        return self.overload(*args)

    def body(self, device: str) -> Callable[..., Any]:
        """Make the implementation of torch.ops.fastkernels.NAME for a device type: pick the provider, run it."""
        pick = self._pick  # looked up once: this code runs on every call

        def run(*args: Any, **kwargs: Any) -> Any:
            place = self._place(device) if self.installed else device
            order = self._order.get(place)
            if order is not None and place not in self._tuned:  # what `pick` returns in most calls
                first = order[0]
                if first.supports is None or first.supports(*args, **kwargs) is None:
                    self.calls += 1
                    return first.fn(*args, **kwargs)
            return pick(device, args, kwargs).fn(*args, **kwargs)

        return run

    def run(self, *args: Any) -> Any:
        """Run the body without torch's dispatcher, for the device of the first argument."""
        device = args[0].device.type
        order = self._order.get(device)
        if order is not None and device not in self._tuned:  # as in `body`
            first = order[0]
            if first.supports is None or first.supports(*args) is None:
                self.calls += 1
                return first.fn(*args)
        return self._pick(device, args, {}).fn(*args)

    def into(self, out: torch.Tensor, *args: Any) -> None:
        """Run the op and put its result into `out`, a tensor of the result's shape and dtype.

        A provider with `out` writes there directly if `out` is contiguous; other results are copied. Only for code that
        torch.compile does not trace, such as the hosts' attention: a tracer would not see one op here. Raises
        ValueError if the result is not one tensor of that shape, dtype and device.
        """
        provider = self._pick(args[0].device.type, args, {})
        found = provider.fn(*args, out=out) if provider.out and out.is_contiguous() else provider.fn(*args)
        if found is out:
            return
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{self.name}: {provider.name} returns {type(found).__name__}, not one tensor for `out`"
            )
        if (found.shape, found.dtype, found.device) != (out.shape, out.dtype, out.device):
            raise ValueError(
                f"{self.name}: out is {_described(out)}, the result of {provider.name} is {_described(found)}"
            )
        out.copy_(found)

    def onto(self, new: tuple[torch.Tensor, ...], changed: tuple[int, ...], *args: Any) -> None:
        """Run an op that mutates the arguments at positions `changed`, but write their new values to `new`."""
        provider = self._pick(args[0].device.type, args, {})
        if provider.out:
            provider.fn(*args, out=new)
            return
        given = list(args)
        for i, tensor in zip(changed, new, strict=True):
            given[i] = tensor.copy_(args[i])
        provider.fn(*given)


def _described(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def define(
    schema: str, fake: Callable[..., Any], providers: Sequence[Provider], key: Key | None = None
) -> Op:
    """Define torch.ops.fastkernels.NAME for CPU and CUDA.

    schema     'name(Tensor x, ...) -> Tensor'; mutated arguments are marked (a!), and are never returned
    fake       shape function for torch.compile
    providers  in order of preference; the last one supports every case
    key        how to look a call up in a tuned table, for an op whose fastest provider depends on the shape
    """
    name = schema.partition("(")[0].strip()
    op = Op(name, tuple(providers), key, fake=fake)
    bodies = {device: op.body(device.lower()) for device in ("CPU", "CUDA")}
    _register(schema, bodies, fake)
    op.overload = getattr(torch.ops.fastkernels, name).default
    mutated = [(i, a) for i, a in enumerate(op.overload._schema.arguments) if a.is_write]
    if mutated and all(isinstance(a.type, torch.OptionalType) for _, a in mutated):
        _register(re.sub(r"\(\w!\)", "", schema).replace("(", ".unchanging(", 1), bodies, fake)
        op.unchanging = tuple(i for i, _ in mutated), getattr(torch.ops.fastkernels, name).unchanging
    OPS[name] = op
    registry.defined.add(name)
    return op


def functional(schema: str, fn: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define torch.ops.fastkernels.NAME without providers: a second form of an op (see `Op.onto`)."""
    _register(schema, dict.fromkeys(("CPU", "CUDA"), fn), fake)
    return getattr(torch.ops.fastkernels, schema.partition("(")[0]).default


def _register(schema: str, bodies: dict[str, Callable[..., Any]], fake: Callable[..., Any]) -> None:
    """Define an op, or an overload 'NAME.OVERLOAD(...)', for the devices of `bodies`."""
    name = schema.partition("(")[0].strip()
    LIBRARY.define(schema)
    for device, body in bodies.items():
        LIBRARY.impl(name, body, device)

    def traced(*args: Any, **kwargs: Any) -> Any:
        device = getattr(args[0] if args else None, "device", None)
        if getattr(device, "type", "") == "cpu" and inductor_repair.tracing():
            inductor_repair.repair()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"fastkernels::{name}", traced, lib=LIBRARY)


@contextmanager
def direct_calls(device: torch.device) -> Iterator[None]:
    """This thread's calls of ops run their bodies without torch's dispatcher: for a step in inference mode on a CPU.

    While a profiler or a dispatch mode of torch is active, calls still go through the dispatcher, so that it sees them.
    """
    if device.type != "cpu" or not torch.is_inference_mode_enabled() or not begin_direct_calls():
        yield
        return
    try:
        yield
    finally:
        end_direct_calls()


def begin_direct_calls() -> bool:
    """Begin what `direct_calls` does, on any device, and return True, unless it has begun or torch watches calls.

    For a step that turns on inference mode itself. Code that Dynamo traces in it still calls the torch op.
    """
    thread = get_ident()
    if thread in _direct or torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    _direct.add(thread)
    return True


def end_direct_calls() -> None:
    """End what `begin_direct_calls` began in this thread."""
    _direct.discard(get_ident())


@contextmanager
def only(provider: str) -> Iterator[None]:
    """Run this provider of every op that has one of that name, whatever is tuned or requested: for oracles."""
    kept = [(op, op._order, op._tuned, op.installed) for op in OPS.values()]
    for op, *_ in kept:
        if found := [p for p in op.providers if p.name == provider]:
            op._order, op._tuned, op.installed = dict.fromkeys(("cpu", "cuda"), found), {}, []
    try:
        yield
    finally:
        for op, order, table, installed in kept:
            op._order, op._tuned, op.installed = order, table, installed


def observe(around: Callable[[Any, Provider], Provider] | None) -> None:
    """Replace every provider of every op by `around(op, provider)`; None restores the providers.

    For fastkernels.capture. Ops apply it when they resolve their providers, so it costs nothing when unused.
    """
    global _around
    _around = around
    for op in OPS.values():
        op.forget()


def recorded() -> bool:
    """Whether a function is around every provider."""
    return _around is not None


def counters() -> dict[str, dict[str, Any]]:
    """{op: {'calls': n, 'fallbacks': {reason: n}}} of this process."""
    return {name: {"calls": op.calls, "fallbacks": dict(op.fallbacks)} for name, op in OPS.items()}


def proving(name: str) -> list[Op]:
    """The loaded functional ops whose call counters prove that an op runs: its own, or those that its modules call."""
    names = [name] if name in OPS else registry.get(name).calls
    return [OPS[n] for n in names if n in OPS]


def fusions_of(name: str) -> list[Op]:
    """The loaded functional ops that may run in place of this op, as part of a fusion; see OpSpec.stands_for."""
    return [OPS[n] for n in registry.op_names() if n in OPS and name in registry.get(n).stands_for]
