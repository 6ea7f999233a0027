"""The choice between the host's code and ours at a module's first call of a shape, by time on the caller's tensors.

For models of this process that no table describes. Code that torch.compile traces keeps ours only of classes, on chips,
for which that was measured to be faster; elsewhere an op of ours would stand in the way of the compiler's fusions.
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
import torch._inductor.config as inductor
from torch._dynamo.symbolic_convert import InstructionTranslator

from fastkernels.core.dispatch import OPS, proving
from fastkernels.core.env import Environment
from fastkernels.verify.measure import Ratio, interleaved
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.live import asleep
from fk_integrations.live.asleep import FIRST_CALL as OWN

log = logging.getLogger("fastkernels")
ROUNDS, CPU_ROUNDS, CALLS = 21, 15, 4  # of a graph's calls, or of calls one after the other
EAGER = 1.03  # smaller gains of calls one after the other are noise
CPU_BOUND = 0.5  # a call that keeps the CPU longer than this share of its time: a model of such calls waits for the CPU
ERRORS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the norm of the result
MOST_SHAPES = 256  # that one module remembers
UNDECIDED = "undecided"
COMPILED = "torch.compile fuses the host's code"
NO_GRAPHS = "without CUDA graphs, calls of ours take too much of the CPU"
MEASURING: list[Any] = []  # modules that decide now: what they run is no proof


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

    compiled  whether compiled code keeps ours
    plainly   why compiled code without CUDA graphs keeps the host's; empty: it keeps ours, too
    choices   {what identifies a call: decision}; modules of the same sizes share them
    modules   that began with ours
    restored  of these, how many are the host's again
    group     those whose eager calls are the host's, and that have its class for these
    """

    op: str
    host_class: Any
    compiled: bool = False
    plainly: str = ""
    choices: dict[Any, Choice] = field(default_factory=dict)
    modules: int = 0
    restored: int = 0
    group: asleep.Group = field(default_factory=asleep.Group)

    def begin(self, holder: Any, sizes: Any, back: Callable[[], None], journal: Journal) -> None:
        """Let the first calls of `holder`, which has a live class, decide; `back` makes it the host's again."""
        journal.add(lambda: vars(holder).pop(OWN, None))
        journal.add(self.group.wake)
        vars(holder)[OWN] = _Own(self, sizes, back)
        self.modules += 1

    def lines(self) -> list[str]:
        compiled = ["compiled code is ours"] if self.compiled else []
        if compiled and self.plainly:
            compiled = [f"compiled code is ours in CUDA graphs only: {self.plainly}"]
        return [f"{self.op} {text}" for text in (*compiled, *(c.text for c in self.choices.values()))]


@dataclass
class _Own:
    """The part of a trial that belongs to one module.

    left     whether all calls but compiled ones are the host's
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
    rests: bool = False
    where: int | str = 0
    at_once: dict[Any, bool] = field(default_factory=dict)


def decides(adapter: Adapter, device: str) -> bool:
    """Whether the first calls of a model on this device decide: on a GPU, unless FASTKERNELS_VERIFY=0."""
    wanted = Environment.read().verify
    return adapter.first_call and (device == "cuda" if wanted is None else wanted)


def sizes_of(module: Any) -> Any:
    """Types and shapes of a module's parts: modules with the same take the same time."""
    tensors = ((name, tuple(t.shape), t.dtype) for name, t in module.named_parameters())
    return (*tensors, getattr(module, "heads", None))


def choosing(
    theirs: Callable[..., Any], ours: Callable[..., Any], op: str, compiled: bool, plainly: bool, name: str
) -> Callable[..., Any]:
    """A method `name` that runs `theirs` or `ours`: for each kind of call what took less time the first time.

    compiled, plainly: whether compiled code keeps ours, and whether it does so without CUDA graphs.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if compiled and (plainly or in_graphs()):
                return ours(self, *args, **kwargs)
            _leave_to_compiler(op, compiled)
            return theirs(self, *args, **kwargs)
        own: _Own | None = vars(self).get(OWN)
        if own is None:  # undone, and still held by other code
            return theirs(self, *args, **kwargs)
        if own.trial.group.asleep:  # a call of other shapes, or one that is ours
            own.trial.group.wake()
        call = (*_signature(args), *_signature(kwargs.items()))
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
            own.trial.group.sleep(self)
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


@torch._dynamo.assume_constant_result
def in_graphs() -> bool:
    """Whether code that torch.compile traces now will run in CUDA graphs, as its mode or FASTKERNELS_GRAPHS says."""
    if Environment.read().graphs or inductor.triton.cudagraphs:
        return True
    compiler: Any = getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)
    while compiler is not None:
        config = getattr(compiler, "config", None)  # of torch.compile's mode and options
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            return True
        if getattr(compiler, "compiler_name", "") == "cudagraphs":
            return True
        compiler = getattr(compiler, "__wrapped__", getattr(compiler, "_torchdynamo_orig_backend", None))
    return False


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
def _leave_to_compiler(op: str, in_graphs_only: bool) -> None:
    """Count a place that is compiled; runs while torch.compile traces it."""
    for found in proving(op):
        found.leave(NO_GRAPHS if in_graphs_only else COMPILED)


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
        counted = [(op, op.calls, op.owned, op.plain, op.fallbacks, op.left) for op in OPS.values()]
        run = (partial(theirs, module, *args, **kwargs), partial(live, module, *args, **kwargs))
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        MEASURING.append(module)
        own.choices[call] = Choice(True, True, UNDECIDED)  # while it is measured
        try:
            found = _measured(*run, device)
        finally:
            MEASURING.pop()
            del own.choices[call]
            for op, calls, owned, plain, fallbacks, left in counted:
                op.calls, op.owned, op.plain, op.fallbacks, op.left = calls, owned, plain, fallbacks, left
        text = f"{own.trial.host_class.__name__} {kind} {shapes}: {found.text}"
        own.trial.choices[place] = Choice(found.captured, found.eager, text)
    choice = own.choices[call] = own.trial.choices[place]
    if not any(found.captured or found.eager for found in own.choices.values()):
        if own.trial.compiled:
            own.left = True
        else:
            own.back()  # without a wrapper of ours from now on
            own.trial.restored += 1
    return choice


def _measured(theirs: Callable[[], Any], ours: Callable[[], Any], device: torch.device) -> Choice:
    """Compare results, then times: in a CUDA graph, which ours has to win, and of calls one after the other.

    If ours loses the latter, because it takes more of the CPU, it runs in graphs only. Of calls one after the other
    the fastest count, because a busy CPU delays the others.
    """
    try:
        if (reason := _different(ours(), theirs())) is not None:
            return Choice(False, False, f"the host's; {reason}")
        calls: list[list[Any]] = [[]] * CALLS
        rounds = ROUNDS if device.type == "cuda" else CPU_ROUNDS
        eager, issued = _eager([theirs, ours], device, rounds)
        in_graph = interleaved([theirs, ours], calls, device, rounds)
    except Exception as error:  # of a kernel, a compiler or a capture
        text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        log.warning("a module stays with the host: %s", text)
        return Choice(False, False, f"the host's; {text}")
    alone, graphed = (Ratio.of(*reversed(times)) for times in (eager, in_graph))
    one_by_one = alone.value > 1.0 and _wins_eager(*map(min, eager), *map(min, issued))
    captured = graphed.low > 1.0
    cpu = min(issued[0]) / min(issued[1])
    ratio = f"{graphed.value:.3f} ({graphed.low:.3f} to {graphed.high:.3f}), eager {alone.value:.3f}, CPU {cpu:.3f}"
    whose = ("ours" if one_by_one else "ours in CUDA graphs") if captured else "the host's"
    return Choice(captured, captured and one_by_one, f"{whose} ({ratio})")


def _wins_eager(theirs: float, ours: float, theirs_issued: float, ours_issued: float) -> bool:
    """Whether ours is faster in calls one after the other. All in seconds; issued: until the CPU can go on.

    If the calls of a model wait for the CPU, only its time counts: a shorter kernel gains nothing there.
    """
    if theirs < EAGER * ours:
        return False
    return ours_issued <= theirs_issued or ours_issued <= CPU_BOUND * ours


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


def _eager(
    subjects: list[Callable[[], Any]], device: torch.device, rounds: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of CALLS calls one after the other, by subject and round: until they end, and until the last returns."""
    times: list[list[float]] = [[] for _ in subjects]
    issued: list[list[float]] = [[] for _ in subjects]
    for i in range(rounds):
        for j in range(len(subjects)):
            which = (i + j) % len(subjects)
            _wait(device)
            began = time.perf_counter()
            for _ in range(CALLS):
                subjects[which]()
            issued[which].append(time.perf_counter() - began)
            _wait(device)
            times[which].append(time.perf_counter() - began)
    return times, issued


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
