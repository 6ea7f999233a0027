"""The choice between the host's code and ours at a module's first call of a shape, by time on the caller's tensors.

For models of this process that no table describes. `traced` decides about code that torch.compile traces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._dynamo.comptime import comptime

from fastkernels.core.env import Environment
from fastkernels.verify.measure import Ratio, interleaved
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.live import asleep
from fk_integrations.live.asleep import FIRST_CALL as OWN
from fk_integrations.live.decorated import wrapper
from fk_integrations.live.traced import FUSED, Decided, keeps_ours, looking
from fk_integrations.live.versus import CALLS, different, measuring, one_by_one

log = logging.getLogger("fastkernels")
ROUNDS, CPU_ROUNDS = 21, 15  # of a graph's calls, or of calls one after the other
EAGER = 1.03  # smaller gains of calls one after the other are noise
CPU_BOUND = 0.5  # a call that keeps the CPU longer than this share of its time: a model of such calls waits for the CPU
MOST_SHAPES = 256  # that one module remembers
UNDECIDED = "undecided"


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

    compiled  the decisions about code that torch.compile traces; None: it keeps the host's
    uncompiled  why it keeps the host's then
    choices   {what identifies a call: decision}; modules of the same sizes share them
    modules   that began with ours
    restored  of these, how many are the host's again
    owns      the part of each module
    group     those whose eager calls are the host's, and that have its class for these
    """

    op: str
    host_class: Any
    compiled: Decided | None = None
    uncompiled: str = FUSED
    choices: dict[Any, Choice] = field(default_factory=dict)
    modules: int = 0
    restored: int = 0
    owns: list[_Own] = field(default_factory=list)
    group: asleep.Group = field(default_factory=asleep.Group)

    def begin(self, holder: Any, sizes: Any, back: Callable[[], None], journal: Journal) -> None:
        """Let the first calls of `holder`, which has a live class, decide; `back` makes it the host's again."""
        journal.add(lambda: vars(holder).pop(OWN, None))
        journal.add(self.group.wake)

        def ended() -> None:
            back()
            for name in (OWN, asleep.TALLY):  # the host's copies and pickles of its class would contain them
                vars(holder).pop(name, None)

        vars(holder)[OWN] = own = _Own(self, sizes, ended)
        self.owns.append(own)
        self.modules += 1

    @property
    def left(self) -> int:
        """Modules that the host runs in all calls so far, and that may become ours when they are compiled."""
        if self.compiled is None or self.compiled.ours:
            return 0
        return sum(own.left and not own.ended for own in self.owns)

    def lines(self) -> list[str]:
        compiled = self.compiled.lines() if self.compiled is not None else []
        return [f"{self.op} {text}" for text in (*(c.text for c in self.choices.values()), *compiled)]


@dataclass
class _Own:
    """The part of a trial that belongs to one module.

    left     whether all calls but compiled ones are the host's
    traced   whether torch.compile has traced the module
    ended    whether the module is the host's for good
    rests    whether the module sleeps after a call that is the host's
    where    the position or name of the first tensor of a call
    at_once  {(shape, dtype) of that tensor: whether ours runs in the capture of a graph}, of calls whose eager code is
             the host's. Calls that differ elsewhere share an entry, so that finding it takes next to nothing
    """

    trial: Trial
    sizes: Any
    back: Callable[[], None]
    choices: dict[Any, Choice] = field(default_factory=dict)
    left: bool = False
    traced: bool = False
    ended: bool = False
    rests: bool = False
    where: int | str = 0
    at_once: dict[Any, bool] = field(default_factory=dict)

    def leave(self) -> None:
        """Let the host run all later calls, compiled ones aside, if these may still become ours."""
        self.left = True
        if self.trial.compiled is None or not (self.trial.group.allowed or self.traced):
            self.end()

    def end(self) -> None:
        """Make the module the host's for good: no wrapper of ours from now on."""
        if not self.ended:
            self.ended = True
            self.back()
            self.trial.restored += 1

    def rest(self, module: Any) -> None:
        """Before a call of a module that `leave` has left: let it sleep, or end if it can sleep no more."""
        if self.trial.group.allowed:
            self.trial.group.sleep(module)
        elif not self.traced:
            self.end()


def decides(adapter: Adapter, device: str) -> bool:
    """Whether the first calls of a model on this device decide: on a GPU, unless FASTKERNELS_VERIFY=0."""
    wanted = Environment.read().verify
    return adapter.first_call and (device == "cuda" if wanted is None else wanted)


def sizes_of(module: Any) -> Any:
    """Types and shapes of a module's parts: modules with the same take the same time."""
    tensors = ((name, tuple(t.shape), t.dtype) for name, t in module.named_parameters())
    return (*tensors, getattr(module, "heads", None))


def choosing(theirs: Callable[..., Any], ours: Callable[..., Any], op: str, name: str) -> Callable[..., Any]:
    """A method `name` that runs `theirs` or `ours`: for each kind of call what took less time the first time."""
    look = looking(theirs, ours, op)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            comptime(look)
            return (ours if keeps_ours() else theirs)(self, *args, **kwargs)
        own: _Own | None = vars(self).get(OWN)
        if own is None:  # undone, and still held by other code
            return theirs(self, *args, **kwargs)
        if own.trial.group.asleep:  # a call of other shapes, or one that is ours
            own.trial.group.wake()
        # An op of ours may not know of autocast, and then differ from the host's code.
        call = (*_signature(args), *_signature(kwargs.items()), torch._C._is_any_autocast_enabled())
        choice = own.choices.get(call)
        if choice is None:
            choice = _decide(self, own, call, theirs, getattr(type(self), name), args, kwargs)
        use = choice.eager
        if not use:
            x = _remember(own, choice, args, kwargs)
            use = choice.captured and x is not None and capturing(x)
        return (ours if use else theirs)(self, *args, **kwargs)

    return wrapper(method, theirs)


def hosts_first(theirs: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs `theirs` at once where that is decided, else `method`, which decides or runs ours.

    The host's calls pay for each line and each call of Python here.
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return method(self, *args, **kwargs)
        own: _Own | None = self.__dict__.get(OWN)
        if own is None:
            return theirs(self, *args, **kwargs)
        if own.left:
            own.rest(self)
            return theirs(self, *args, **kwargs)
        where = own.where
        x = kwargs.get(where) if isinstance(where, str) else args[where] if len(args) > where else None
        if type(x) is torch.Tensor:
            captured = own.at_once.get((x.shape, x.dtype))
            if captured is not None and not (captured and capturing(x)):
                if own.rests and own.trial.group.allowed:
                    own.trial.group.sleep(self)
                return theirs(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return wrapper(run, method)


def capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _remember(own: _Own, choice: Choice, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Let later calls like this one run the host's code at once; its first tensor."""
    for where, x in (*enumerate(args), *kwargs.items()):
        if isinstance(x, torch.Tensor):
            if choice.text != UNDECIDED:
                if own.where != where or len(own.at_once) >= MOST_SHAPES:
                    own.where, own.at_once = where, {}
                own.at_once[x.shape, x.dtype] = choice.captured
                own.rests = not own.trial.group.stays_awake(own, own.sizes)
            return x
    return None


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
    module: Any, own: _Own, call: Any, theirs: Callable[..., Any], live: Callable[..., Any], args: Any, kwargs: Any
) -> Choice:  # fmt: skip
    """Decide for calls like this one; the host's, undecided, where nothing can be measured now.

    live  the method as calls find it, with all Python that chooses and counts
    """
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    device = next((t.device for t in tensors), torch.device("cpu"))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Choice(False, False, UNDECIDED)
    place = (own.sizes, call)
    if place not in own.trial.choices:
        run = (partial(theirs, module, *args, **kwargs), partial(live, module, *args, **kwargs))
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        own.choices[call] = Choice(True, True, UNDECIDED)  # while it is measured
        try:
            with measuring(module):
                found = _measured(*run, device)
        finally:
            del own.choices[call]
        text = f"{own.trial.host_class.__name__} {kind} {shapes}: {found.text}"
        own.trial.choices[place] = Choice(found.captured, found.eager, text)
    choice = own.choices[call] = own.trial.choices[place]
    if not any(found.captured or found.eager for found in own.choices.values()):
        own.leave()
    return choice


def _measured(theirs: Callable[[], Any], ours: Callable[[], Any], device: torch.device) -> Choice:
    """Compare results, then times: in a CUDA graph, which ours has to win, and of calls one after the other.

    If ours loses the latter, because it takes more of the CPU, it runs in graphs only. Of calls one after the other
    the fastest count, because a busy CPU delays the others.
    """
    try:
        if (reason := different(ours(), theirs())) is not None:
            return Choice(False, False, f"the host's; {reason}")
        calls: list[list[Any]] = [[]] * CALLS
        rounds = ROUNDS if device.type == "cuda" else CPU_ROUNDS
        eager, issued = one_by_one([theirs, ours], device, rounds)
        in_graph = interleaved([theirs, ours], calls, device, rounds)
    except Exception as error:  # of a kernel, a compiler or a capture
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        log.warning("a module stays with the host: %s", text)
        return Choice(False, False, f"the host's; {text}")
    alone, graphed = (Ratio.of(*reversed(times)) for times in (eager, in_graph))
    in_turn = alone.value > 1.0 and _wins_eager(*map(min, eager), *map(min, issued))
    captured = graphed.low > 1.0
    cpu = min(issued[0]) / min(issued[1])
    ratio = f"{graphed.value:.3f} ({graphed.low:.3f} to {graphed.high:.3f}), eager {alone.value:.3f}, CPU {cpu:.3f}"
    whose = ("ours" if in_turn else "ours in CUDA graphs") if captured else "the host's"
    return Choice(captured, captured and in_turn, f"{whose} ({ratio})")


def _wins_eager(theirs: float, ours: float, theirs_issued: float, ours_issued: float) -> bool:
    """Whether ours is faster in calls one after the other. All in seconds; issued: until the CPU can go on.

    If the calls of a model wait for the CPU, only its time counts: a shorter kernel gains nothing there.
    """
    if theirs < EAGER * ours:
        return False
    return ours_issued <= theirs_issued or ours_issued <= CPU_BOUND * ours
