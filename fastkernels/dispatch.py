"""Functional ops and their providers: torch.ops.fastkernels.NAME and which implementation runs it.

Order: candidate, FASTKERNELS_PROVIDER=op:name, the op's own list. A provider that is not there for this
device is passed over; one that does not support the case is passed over, counted and logged once
(FASTKERNELS_STRICT=1: an error). A call is one run of the op's body: a replayed CUDA graph runs none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import torch

from .env import Environment

log = logging.getLogger("fastkernels")
LIBRARY = torch.library.Library("fastkernels", "FRAGMENT")
OPS: dict[str, Op] = {}
_around: Callable[[Op, Provider], Provider] | None = None


class UnsupportedCase(RuntimeError):
    """FASTKERNELS_STRICT=1 and a provider refused a case."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op.

    fn        called with the op's arguments; mutates what the op mutates, returns what the op returns
    devices   device types it runs on ('triton' also runs on 'cpu' under TRITON_INTERPRET=1)
    module    an importable module that it needs, e.g. 'flash_attn_interface'; of a tuple, any one
    supports  supports(*args) -> None if this case is supported, else the reason; must not synchronize
    params    sets of keyword arguments that `fn` may be given after the op's own (tile sizes, splits): what
              `fk-bench tune` chooses from. A call without any is the kernel's own choice
    """

    name: str
    fn: Callable[..., Any]
    devices: tuple[str, ...] = ("cuda",)
    module: str | tuple[str, ...] | None = None
    supports: Callable[..., str | None] | None = None
    params: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)

    def bound(self, params: Mapping[str, Any] | None) -> Provider:
        """This provider with these of its parameters in every call."""
        return replace(self, fn=partial(self.fn, **params)) if params else self

    def unavailable(self, device: str) -> str | None:
        """Why this provider cannot run on that device type here; None if it can."""
        interpreted = self.name == "triton" and device == "cpu" and Environment.read().interpret
        if device not in self.devices and not interpreted:
            return f"{self.name} runs on {', '.join(self.devices)}, not on {device}"
        wanted = (self.module,) if isinstance(self.module, str) else self.module or ()
        if wanted and not any(map(_installed, wanted)):
            return f"{self.name} needs {' or '.join(wanted)}, which is not installed"
        return None


def _installed(module: str) -> bool:
    """Whether a module is there, without importing it or, as importlib.util.find_spec does, its parents.

    A folder of that name without an __init__.py is not the library.
    """
    path: Sequence[str] | None = None
    for i, name in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:i]) if path is None else name, path)
        if spec is None or (i == len(parts) and spec.origin is None):
            return False
        path = spec.submodule_search_locations or ()
    return True


@dataclass
class Op:
    """A functional op: schema, fake, providers, and the counters that prove it ran."""

    name: str
    providers: tuple[Provider, ...]
    overload: Any = None
    calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    candidate: Provider | None = None
    _order: dict[str, list[Provider]] = field(default_factory=dict)
    _strict: bool = False

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def body(self, device: str) -> Callable[..., Any]:
        """What torch.ops.fastkernels.NAME calls for tensors of that device type: picks the provider and runs it."""
        orders = (
            self._order
        )  # a closure a device, and no look-up that can be made once: this is paid on every call

        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            for provider in orders.get(device) or self._resolve(device):
                supports = provider.supports
                if supports is None:
                    return provider.fn(*args, **kwargs)
                reason = supports(*args, **kwargs)
                if reason is None:
                    return provider.fn(*args, **kwargs)
                self.note(f"{provider.name}: {reason}")
            raise UnsupportedCase(
                f"{self.name}: no provider supports this case on {device}: {self.fallbacks}"
            )

        return run

    def run(self, *args: Any) -> Any:
        """The body, without torch's dispatcher; the first argument's device counts."""
        return self.body(args[0].device.type)(*args)

    def order(self, device: str) -> list[tuple[Provider, str | None]]:
        """All providers in order of preference, each with the reason why it is not there (None: it is)."""
        wanted = Environment.read().provider.get(self.name)
        names = [p.name for p in self.providers]
        if wanted is not None and wanted not in names:
            raise ValueError(
                f"FASTKERNELS_PROVIDER: {self.name} has no provider {wanted!r}, it has {', '.join(names)}"
            )
        first = [p for p in (self.candidate,) if p is not None]
        chosen = [p for p in self.providers if p.name == wanted]
        rest = [p for p in self.providers if p.name != wanted]
        return [(p, p.unavailable(device)) for p in (*first, *chosen, *rest)]

    def set_candidate(
        self,
        fn: Callable[..., Any] | None,
        label: str = "candidate",
        supports: Callable[..., str | None] | None = None,
    ) -> None:
        """Run `fn` instead of our providers (None: back to ours), for all calls or those that `supports` takes."""
        devices = ("cuda", "cpu")
        self.candidate = None if fn is None else Provider(label, fn, devices, supports=supports)
        self._order.clear()

    def reset(self) -> None:
        """Counters to zero, and the order of providers read from the environment again."""
        self.calls = 0
        self.fallbacks = {}
        self._order.clear()

    def _resolve(self, device: str) -> list[Provider]:
        self._strict = Environment.read().strict
        order = self.order(device)
        wanted = Environment.read().provider.get(self.name)
        for provider, reason in order:
            if provider.name == wanted and reason is not None:
                self.note(reason)
        found = [provider for provider, reason in order if reason is None]
        if not found:
            raise UnsupportedCase(
                f"{self.name}: no provider on {device}: " + "; ".join(r or "" for _, r in order)
            )
        if _around is not None:
            found = [_around(self, provider) for provider in found]
        self._order[device] = found
        return found

    def note(self, reason: str) -> None:
        """Count a fall-back and log it once. Raises UnsupportedCase under FASTKERNELS_STRICT=1."""
        if self._strict:
            raise UnsupportedCase(f"{self.name}: {reason} (FASTKERNELS_STRICT=1)")
        if reason not in self.fallbacks:
            log.warning("%s falls back in pid %d: %s", self.name, os.getpid(), reason)
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


def define(schema: str, fake: Callable[..., Any], providers: Sequence[Provider]) -> Op:
    """Define torch.ops.fastkernels.NAME for CPU and CUDA.

    schema     'name(Tensor x, ...) -> Tensor'; mutated arguments are marked (a!), and are never returned
    fake       shape function for torch.compile
    providers  in order of preference; the last one supports every case
    """
    name = schema.partition("(")[0].strip()
    op = Op(name, tuple(providers))
    LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, op.body(key.lower()), key)
    torch.library.register_fake(f"fastkernels::{name}", fake, lib=LIBRARY)
    op.overload = getattr(torch.ops.fastkernels, name).default
    OPS[name] = op
    return op


def observe(around: Callable[[Op, Provider], Provider] | None) -> None:
    """Run `around(op, provider)` in place of every provider, of all ops, from here on; None: the providers themselves.

    For fastkernels.capture. It is asked when an op finds its providers, so nothing is paid where it is not used.
    """
    global _around
    _around = around
    for op in OPS.values():
        op._order.clear()


def counters() -> dict[str, dict[str, Any]]:
    """{op: {'calls': n, 'fallbacks': {reason: n}}} of this process."""
    return {name: {"calls": op.calls, "fallbacks": dict(op.fallbacks)} for name, op in OPS.items()}
