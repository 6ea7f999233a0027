"""The choice between the host's code and ours at a module's first call of a shape, by time on the caller's tensors.

For models of this process that no table describes. Code that torch.compile traces stays the host's: a compiler fuses it
with its neighbours, and an op of ours would stand in its way.
"""

from __future__ import annotations

import logging
import reprlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import torch

from fastkernels.core.dispatch import OPS, proving
from fastkernels.core.env import Environment
from fastkernels.verify.measure import Ratio, interleaved
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal

log = logging.getLogger("fastkernels")
ROUNDS, CPU_ROUNDS, CALLS = 21, 15, 4  # of a graph's calls, or of calls one after the other
EAGER = 1.02  # a method that chooses adds Python of its own to calls outside of a graph
ERRORS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the norm of the result
COMPILED = "torch.compile fuses the host's code"
OWN = "_fastkernels_first_call"


@dataclass(frozen=True)
class Choice:
    """One decision, and its line in the report.

    captured  whether ours runs in the capture of a CUDA graph
    eager     whether ours runs in calls one after the other
    """

    captured: bool
    eager: bool
    text: str


@dataclass
class Trial:
    """The decisions about one host class in one patch.

    compiled  whether compiled code keeps ours; else `why_not` is the reason
    choices   {what identifies a call: decision}; modules of the same sizes share them
    modules   that began with ours
    restored  of these, how many are the host's again
    """

    op: str
    host_class: Any
    compiled: bool = False
    uncompiled: str = ""
    choices: dict[Any, Choice] = field(default_factory=dict)
    modules: int = 0
    restored: int = 0

    def begin(self, holder: Any, sizes: Any, back: Callable[[], None], journal: Journal) -> None:
        """Let the first calls of `holder`, which has a live class, decide; `back` makes it the host's again."""
        journal.add(lambda: vars(holder).pop(OWN, None))
        vars(holder)[OWN] = _Own(self, sizes, back)
        self.modules += 1

    def lines(self) -> list[str]:
        compiled = [f"compiled code is the host's: {self.uncompiled}"] if self.uncompiled else []
        return [
            f"{self.op} {text}" for text in (*compiled, *(choice.text for choice in self.choices.values()))
        ]


@dataclass
class _Own:
    """The part of a trial that belongs to one module."""

    trial: Trial
    sizes: Any
    back: Callable[[], None]
    choices: dict[Any, Choice] = field(default_factory=dict)


def decides(adapter: Adapter, device: str) -> bool:
    """Whether the first calls of a model on this device decide: on a GPU, unless FASTKERNELS_VERIFY=0."""
    wanted = Environment.read().verify
    return adapter.first_call and (device == "cuda" if wanted is None else wanted)


def sizes_of(module: Any) -> Any:
    """Types and shapes of a module's parts: modules with the same take the same time."""
    tensors = ((name, tuple(t.shape), t.dtype) for name, t in module.named_parameters())
    return (*tensors, getattr(module, "heads", None))


def choosing(
    theirs: Callable[..., Any], ours: Callable[..., Any], op: str, compiled: bool
) -> Callable[..., Any]:
    """A method that runs `theirs` or `ours`: for each kind of call what took less time the first time."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled:
                return ours(self, *args, **kwargs)
            _leave_to_compiler(op)
            return theirs(self, *args, **kwargs)
        own: _Own | None = vars(self).get(OWN)
        if own is None:  # undone, and still held by other code
            return theirs(self, *args, **kwargs)
        call = (*_signature(args), *_signature(kwargs.items()))
        choice = own.choices.get(call)
        if choice is None:
            choice = _decide(self, own, call, theirs, ours, args, kwargs)
        use = choice.eager
        if use != choice.captured and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            use = choice.captured
        return (ours if use else theirs)(self, *args, **kwargs)

    return wrapper(method, theirs)


def wrapper(run: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.update_wrapper` for code that torch.compile traces.

    diffusers reads the signature of a processor's __call__ in forward. torch 2.13 then guards on the defaults of `run`,
    with the length of those of `inner`. A function of *args and **kwargs does not use its own.
    torch.compile limits the recompilations of a code object, so each function gets one that no other has.
    """
    run.__code__ = run.__code__.replace()
    run.__defaults__ = getattr(inner, "__defaults__", None)
    return update_wrapper(run, inner)


@torch._dynamo.assume_constant_result
def _leave_to_compiler(op: str) -> None:
    """Count a place that is compiled; runs while torch.compile traces it."""
    for found in proving(op):
        found.leave(COMPILED)


def _signature(values: Any) -> Iterator[Any]:
    """The parts of a call that its time depends on. Sizes count by powers of two: lengths vary."""
    for value in values:
        if isinstance(value, torch.Tensor):
            dims = value.dim()
            width = value.shape[1 if dims == 4 else -1] if dims else 0
            yield (
                dims,
                width,
                value.numel().bit_length(),
                value.stride(-1) == 1 if dims else True,
                value.dtype,
            )
        elif isinstance(value, (tuple, list)):
            yield tuple(_signature(value))
        elif isinstance(value, (int, float, str, type(None))):
            yield value
        else:
            yield type(value)


def _decide(
    module: Any, own: _Own, call: Any, theirs: Callable[..., Any], ours: Callable[..., Any], args: Any, kwargs: Any
) -> Choice:  # fmt: skip
    """Decide for calls like this one; the host's, undecided, where nothing can be measured now."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    device = next((t.device for t in tensors), torch.device("cpu"))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Choice(False, False, "undecided")
    place = (own.sizes, call)
    if place not in own.trial.choices:
        counted = [(op, op.calls, op.owned, op.plain, op.fallbacks, op.left) for op in OPS.values()]
        run = (partial(theirs, module, *args, **kwargs), partial(ours, module, *args, **kwargs))
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        found = _measured(*run, device, _cost_of_choosing(args, kwargs))
        text = f"{own.trial.host_class.__name__} {kind} {shapes}: {found.text}"
        own.trial.choices[place] = Choice(found.captured, found.eager, text)
        for op, calls, owned, plain, fallbacks, left in counted:  # what a measurement runs is no proof
            op.calls, op.owned, op.plain, op.fallbacks, op.left = calls, owned, plain, fallbacks, left
    choice = own.choices[call] = own.trial.choices[place]
    if not any(found.captured or found.eager for found in own.choices.values()):
        own.back()  # without a wrapper of ours from now on
        own.trial.restored += 1
    return choice


def _cost_of_choosing(args: Any, kwargs: Any) -> float:
    """Seconds that a method which chooses adds to a call."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        hash((*_signature(args), *_signature(kwargs.items())))
        least = min(least, time.perf_counter() - began)
    return least


def _measured(
    theirs: Callable[[], Any], ours: Callable[[], Any], device: torch.device, choosing: float = 0.0
) -> Choice:  # fmt: skip
    """Compare results, then times: in a CUDA graph, which ours has to win, and of calls one after the other.

    If ours loses the latter, because it takes more Python, it runs in graphs only, and only if the choice takes next
    to nothing of a call. Of calls one after the other the fastest count, because a busy CPU delays the others.

    choosing  seconds that the choice adds to a call
    """
    try:
        if (reason := _different(ours(), theirs())) is not None:
            return Choice(False, False, f"the host's; {reason}")
        calls: list[list[Any]] = [[]] * CALLS
        rounds = ROUNDS if device.type == "cuda" else CPU_ROUNDS
        eager, in_graph = (
            _eager([theirs, ours], device, rounds),
            interleaved([theirs, ours], calls, device, rounds),
        )
    except Exception as error:  # of a kernel, a compiler or a capture
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        log.warning("a module stays with the host: %s", text)
        return Choice(False, False, f"the host's; {text}")
    alone, graphed = (Ratio.of(*reversed(times)) for times in (eager, in_graph))
    best = [min(times) for times in eager]
    one_by_one = best[0] >= EAGER * best[1]
    captured = graphed.low > 1.0 and (one_by_one or choosing * CALLS <= (EAGER - 1) * best[0])
    ratio = f"{graphed.value:.3f} ({graphed.low:.3f} to {graphed.high:.3f}), eager {alone.value:.3f}"
    whose = ("ours" if one_by_one else "ours in CUDA graphs") if captured else "the host's"
    return Choice(captured, captured and one_by_one, f"{whose} ({ratio})")


def _different(got: Any, want: Any) -> str | None:
    """Why our result is not the host's, or None."""
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return f"our result is a {type(got).__name__}"
        return next((why for a, b in zip(got, want, strict=True) if (why := _different(a, b))), None)
    if not isinstance(want, torch.Tensor):
        same = type(got) is type(want) and got == want
        return None if same else f"our result is {_shown(got)}, the host's {_shown(want)}"
    if not isinstance(got, torch.Tensor):
        return f"our result is {_shown(got)}, the host's {_shown(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"our result is {tuple(got.shape)} {got.dtype}, the host's {tuple(want.shape)} {want.dtype}"
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))
    return None if error <= ERRORS.get(want.dtype, 1e-4) else f"our result differs by {error:.2g} of its norm"


def _shown(value: Any) -> str:
    """A value for a message: a tensor by its shape and dtype, all else in at most 80 characters."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return reprlib.repr(value)[:80] if _plain(value) else f"a {type(value).__name__}"


def _plain(value: Any) -> bool:
    """Whether a value prints no tensor."""
    return isinstance(value, (int, float, complex, str, bytes, bool, type(None)))


def _eager(subjects: list[Callable[[], Any]], device: torch.device, rounds: int) -> list[list[float]]:
    """Seconds of CALLS calls one after the other, by subject and round, with all that Python adds."""
    times: list[list[float]] = [[] for _ in subjects]
    for i in range(rounds):
        for j in range(len(subjects)):
            which = (i + j) % len(subjects)
            _wait(device)
            began = time.perf_counter()
            for _ in range(CALLS):
                subjects[which]()
            _wait(device)
            times[which].append(time.perf_counter() - began)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
