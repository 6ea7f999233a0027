"""The choice between the host's code and ours where torch.compile traces a module: by the time of both, compiled.

While Dynamo traces a call, the shapes of its arguments are known, and the compiled code does not exist yet. Both sides
are then compiled with the caller's backend and options, and timed on random inputs of these shapes: in a CUDA graph if
the caller's code will run in one, else also for the CPU time of a call. Modules inside of a side decide first.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import tracing

from fastkernels.core import kept_files, tuning
from fastkernels.core.dispatch import proving
from fastkernels.core.env import Environment
from fastkernels.verify import cache
from fastkernels.verify.measure import NoRoom, Ratio, interleaved, leave_room
from fk_integrations.live.asleep import FIRST_CALL
from fk_integrations.live.versus import CALLS, different, measuring, one_by_one

log = logging.getLogger("fastkernels")
ROUNDS, CPU_ROUNDS = 41, 9
SECONDS = 85.0  # of all measurements of one patch, with compiling; a kept choice takes none
COPIES = 16  # a call may take this many times the memory of its arguments
CPU_BOUND = 0.5  # a call that keeps the CPU longer than this share of its time may delay the GPU
BACKENDS = "inductor", "aot_eager", "eager"  # "cudagraphs" runs what "aot_eager" does
FUSED = "torch.compile fuses the host's code"
SLOWER = "not faster than the host's in compiled code"
HOW = "requested by name, an op of ours runs in all compiled code"


class _Unknown(Exception):
    """Why nothing is measured for a call."""


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments of a traced call; `alias` numbers the different ones."""

    alias: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Call:
    """One traced call of a method of `module`. Tensors among `args` and `kwargs` are Leaf.

    graphs   whether the code that is compiled runs in CUDA graphs
    how      options of torch.compile for both sides, without CUDA graphs; `compiler`: these as text
    autocast  the dtype of torch.autocast, in which both sides are measured; empty: it is off
    """

    module: Any
    host_class: Any
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graphs: bool
    how: dict[str, Any]
    compiler: str
    autocast: str = ""

    @property
    def leaves(self) -> list[Leaf]:
        return list(_leaves((self.args, self.kwargs)))

    @property
    def mode(self) -> str:
        return "in CUDA graphs" if self.graphs else "without CUDA graphs"

    def key(self) -> str:
        """A name for all that the time of both sides depends on, aside from `kept_files.facts`."""
        parts = (
            self.host_class, self.op, self.graphs, self.compiler, _identity(self.module), _identity(self.args),
            _identity(self.kwargs), sorted(Environment.read().provider.items()), self.autocast,
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __str__(self) -> str:
        tensors = [leaf for leaf in self.leaves if leaf.shape]
        kind = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        shapes = ", ".join(str(list(leaf.shape)) for leaf in tensors[:4])
        cast = f", autocast to {self.autocast}" if self.autocast else ""
        return f"{self.host_class.__name__} {kind} {shapes}{cast}, compiled {self.mode}"


@dataclass
class Traced:
    """The decisions of the modules of one patch while they are traced.

    host, version  of the library whose modules these are
    seconds        that measurements have taken
    began          when the outermost one of those that run now began
    """

    host: str
    version: str
    seconds: float = 0.0
    began: float = 0.0
    _facts: dict[str, str] | None = None
    _kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def kept(self, device: torch.device) -> dict[str, dict[str, Any]]:
        """{key of a call: its choice} of earlier processes and of this one."""
        if self._facts is None:
            self._facts = kept_files.facts(tuning.chip_of(device.type), self.host, self.version)
            self._kept = cache.kept_sides(self._facts)
        return self._kept

    def keep(self, key: str, choice: dict[str, Any]) -> None:
        assert self._facts is not None, "kept() comes first"
        self._kept[key] = choice
        cache.keep_side(key, choice, self._facts)


@dataclass
class Decided:
    """The decisions of one trial: {key of a call: (whether ours runs, its line in the report)}.

    unmeasured  {key of a call: (why there is none, the call)}
    """

    session: Traced
    choices: dict[str, tuple[bool, str]] = field(default_factory=dict)
    unmeasured: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return any(ours for ours, _ in self.choices.values())

    def lines(self) -> list[str]:
        reasons = (f"{call}: the host's; not measured: {why}" for why, call in self.unmeasured.values())
        return [*(text for _, text in self.choices.values()), *reasons]


class _State(threading.local):
    """found: the last decision of this thread; modes: of the measurements that run, the innermost last."""

    def __init__(self) -> None:
        self.found = False
        self.modes: list[bool] = []


_state = _State()


def why_not(device: torch.device) -> str | None:
    """Why compiled code on this device keeps the host's without a measurement."""
    if device.type != "cuda":
        return f"compiled code is measured on a CUDA GPU, not on this {device.type}; {HOW}"
    return None


def looking(theirs: Callable[..., Any], ours: Callable[..., Any], op: str) -> Callable[[Any], None]:
    """A function for `comptime` that decides about the call that is being traced; `keeps_ours` has the answer."""

    def look(context: Any) -> None:
        _state.found = False
        try:
            found, left = _decision(context, theirs, ours, op)
        except Exception as error:  # it must not end the caller's compilation
            log.warning("compiled code of %s stays with the host: %s", op, _said(error))
            found, left = False, f"not measured: {_said(error)}"
        _state.found = found
        if not found:
            for each in proving(op):
                each.leave(left)

    return look


@torch._dynamo.assume_constant_result
def keeps_ours() -> bool:
    """Whether the call that was looked at last runs ours."""
    return _state.found


def _decision(
    context: Any, theirs: Callable[..., Any], ours: Callable[..., Any], op: str
) -> tuple[bool, str]:
    """Whether ours runs in the call, else the reason for the report."""
    module = _local(context, "self").value
    own = vars(module).get(FIRST_CALL)
    if own is None:
        return False, "undone"
    if own.trial.compiled is None:
        return False, own.trial.uncompiled
    own.traced = True
    try:
        call = _call(context, module, own.trial, op)
    except _Unknown as unknown:
        kind = f"{own.trial.host_class.__name__}, compiled"
        own.trial.compiled.unmeasured[str(unknown)] = str(unknown), kind
        return False, f"not measured: {unknown}"
    return decide(own.trial.compiled, call, theirs, ours)


def decide(
    decided: Decided, call: Call, theirs: Callable[..., Any], ours: Callable[..., Any]
) -> tuple[bool, str]:
    """Whether ours runs, else the reason: decided before, kept from an earlier process, or measured now."""
    key = call.key()
    if key not in decided.choices and key not in decided.unmeasured:
        try:
            kept = _kept_or_measured(decided.session, key, call, theirs, ours)
            decided.choices[key] = bool(kept["ours"]), str(kept["text"])
        except _Unknown as unknown:
            decided.unmeasured[key] = str(unknown), str(call)
            log.warning("%s stays with the host: %s", call, unknown)
    if key in decided.unmeasured:
        return False, f"not measured: {decided.unmeasured[key][0]}"
    return decided.choices[key][0], SLOWER


def _kept_or_measured(
    session: Traced, key: str, call: Call, theirs: Callable[..., Any], ours: Callable[..., Any]
) -> dict[str, Any]:
    device = next((leaf.device for leaf in call.leaves), torch.device("cpu"))
    if (reason := why_not(device)) is not None:
        raise _Unknown(reason)
    kept = session.kept(device)
    if key not in kept:
        outermost, began = not _state.modes, time.monotonic()
        session.began = began if outermost else session.began
        if session.seconds + began - session.began >= SECONDS:
            raise _Unknown(f"the limit of {SECONDS:.0f} s was reached; the next start measures the rest")
        _check_place(call, device)
        found, failed = None, ""
        try:
            found = _measured(call, theirs, ours, device)
        except _Unknown as unknown:
            failed = str(unknown)  # the error's frames hold the tensors of the measurement
        finally:
            taken = time.monotonic() - began
            if outermost:
                session.seconds += taken
        if failed:
            gc.collect()
        if outermost and device.type == "cuda":
            torch.cuda.empty_cache()
        if found is None:
            raise _Unknown(failed)
        text = f"{call}: {found['text']}; {taken:.1f} s, {found['bytes'] >> 20} MiB more"
        session.keep(key, {"ours": found["ours"], "text": text})
    return kept[key]


# -- the call


def _call(context: Any, module: Any, trial: Any, op: str) -> Call:
    leaves: dict[int, Leaf] = {}
    args = _given(_local(context, "args"), leaves)
    kwargs = _given(_local(context, "kwargs"), leaves)
    how, compiler = _how()
    cast = _autocast(next((leaf.device.type for leaf in leaves.values()), "cpu"))
    return Call(module, trial.host_class, op, tuple(args), kwargs, graphs_here(), how, compiler, cast)


def _autocast(kind: str) -> str:
    """The dtype of torch.autocast on this kind of device, empty if it is off. Dynamo enters what it traces."""
    on = torch.is_autocast_enabled(kind)
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if on else ""


def _local(context: Any, name: str) -> Any:
    return context.get_local(name)._ComptimeVar__variable.realize()


def _given(variable: Any, leaves: dict[int, Leaf]) -> Any:
    """The value of a variable of Dynamo, with a Leaf for each tensor. Raises _Unknown."""
    variable = variable.realize()
    kind = type(variable).__name__
    if variable.is_tensor() if hasattr(variable, "is_tensor") else kind == "TensorVariable":
        fake = variable.as_proxy().node.meta["example_value"]
        if id(fake) not in leaves:
            if fake.layout is not torch.strided:
                raise _Unknown(f"an argument is a {fake.layout} tensor")
            shape, stride = (tuple(map(_hint, values)) for values in (fake.shape, fake.stride()))
            leaves[id(fake)] = Leaf(len(leaves), shape, stride, fake.dtype, fake.device)
        return leaves[id(fake)]
    if kind == "SymNodeVariable":
        return _hint(variable.sym_num)
    items = vars(variable).get("items") if hasattr(variable, "__dict__") else None
    if isinstance(items, dict):
        return {_plain_key(k): _given(v, leaves) for k, v in items.items()}
    if isinstance(items, (list, tuple)):
        found = [_given(item, leaves) for item in items]
        return found if kind == "ListVariable" else tuple(found)
    if isinstance(value := getattr(variable, "value", None), nn.Module):
        return value
    try:
        return variable.as_python_constant()
    except Exception as error:
        raise _Unknown(f"an argument is a {kind}") from error


def _plain_key(key: Any) -> Any:
    return getattr(key, "vt", key).as_python_constant()


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _leaves(value: Any) -> Iterator[Leaf]:
    if isinstance(value, Leaf):
        yield value
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)


def _identity(value: Any) -> Any:
    """The parts of an argument or of the object on which the time of a call depends, the same in each process."""
    if isinstance(value, Leaf):
        return (value.alias, value.shape, value.stride, str(value.dtype), value.device.type)
    if isinstance(value, dict):
        return tuple((str(key), _identity(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_identity, value))
    if isinstance(value, nn.Module):
        tensors = [(n, tuple(t.shape), str(t.dtype), t.stride()) for n, t in value.named_parameters()]
        return tensors, [(name, _attributes(part)) for name, part in value.named_modules()]
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return repr(value)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return _attributes(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _attributes(holder: Any) -> tuple[Any, ...]:
    """The class and the plain settings of an object, without its position among others and rates of dropout."""
    plain = (
        (name, value if isinstance(value, (bool, int, str)) else value.__qualname__)
        for name, value in vars(holder).items()
        if not name.startswith("_fastkernels") and "idx" not in name and "index" not in name
        and (isinstance(value, (bool, int, str)) or hasattr(value, "__qualname__"))
    )  # fmt: skip
    cls = holder.__class__  # of the host; our subclasses answer for it
    return (f"{cls.__module__}:{cls.__qualname__}", *sorted(plain, key=lambda pair: pair[0]))


# -- the compiler


@torch._dynamo.assume_constant_result
def in_graphs() -> bool:
    """Whether code that torch.compile traces now will run in CUDA graphs, as its mode or FASTKERNELS_GRAPHS says."""
    return graphs_here()


def graphs_here() -> bool:
    """`in_graphs` for code that runs while Dynamo traces."""
    if _state.modes:
        return _state.modes[-1]
    if Environment.read().graphs or inductor.triton.cudagraphs:
        return True
    for compiler in _compilers():
        config = getattr(compiler, "config", None)  # of torch.compile's mode and options
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            return True
        if getattr(compiler, "compiler_name", "") == "cudagraphs":
            return True
    return False


def _compilers() -> Iterator[Any]:
    """The compiler of the code that is traced now: from the outermost wrapper to the backend itself."""
    compiler: Any = getattr(InstructionTranslator.current_tx().output, "compiler_fn", None)
    while compiler is not None:
        yield compiler
        compiler = getattr(compiler, "__wrapped__", getattr(compiler, "_torchdynamo_orig_backend", None))


def _how() -> tuple[dict[str, Any], str]:
    """(Options of torch.compile that compile a side as the caller's code, these as text). Raises _Unknown."""
    innermost = list(_compilers())[-1]
    name = getattr(innermost, "compiler_name", "")
    if name == "inductor":
        options = {key: value for key, value in innermost.config.items() if key != "triton.cudagraphs"}
        text = " ".join(["inductor", *(f"{key}={value}" for key, value in sorted(options.items()))])
        return {"backend": "inductor", "options": {**options, "triton.cudagraphs": False}}, text
    if name == "cudagraphs":
        name = "aot_eager"
    if name in BACKENDS:
        return {"backend": name}, name
    shown = name or getattr(innermost, "__name__", type(innermost).__name__)
    raise _Unknown(f"backend {shown}: measured are {', '.join(BACKENDS)} and cudagraphs; {HOW}")


# -- the measurement


def _check_place(call: Call, device: torch.device) -> None:
    """Raise _Unknown where nothing can be measured now."""
    if getattr(call.module, "training", False):
        raise _Unknown("the module is in training mode")
    for module in (call.module, *call.args, *call.kwargs.values()):
        if isinstance(module, nn.Module):
            places = {p.device.type for p in module.parameters()}
            if places - {device.type}:
                raise _Unknown(f"weights are on {', '.join(sorted(places))}, and the call on {device.type}")
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        raise _Unknown("a CUDA graph is being captured")
    try:
        leave_room(device, COPIES * sum(_bytes(leaf) for leaf in call.leaves))
    except NoRoom as error:
        raise _Unknown(f"too little free memory: {error}") from error


def _extent(leaf: Leaf) -> int:
    """Elements of memory from the first to the last of a tensor."""
    if 0 in leaf.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(leaf.shape, leaf.stride, strict=True))


def _bytes(leaf: Leaf) -> int:
    return _extent(leaf) * leaf.dtype.itemsize


def _made(value: Any, tensors: dict[int, torch.Tensor], generator: torch.Generator) -> Any:
    """An argument with a tensor for each Leaf: numbers with a fraction are random, integers 0, and masks true."""
    if isinstance(value, Leaf):
        if value.alias not in tensors:
            memory = torch.empty(_extent(value), dtype=value.dtype, device=value.device)
            _fill(memory, generator)
            tensors[value.alias] = memory.as_strided(value.shape, value.stride)
        return tensors[value.alias]
    if isinstance(value, dict):
        return {key: _made(item, tensors, generator) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_made(item, tensors, generator) for item in value)
    return value


def _fill(memory: torch.Tensor, generator: torch.Generator) -> None:
    """Write the values of one argument."""
    if memory.dtype.is_complex:
        _fill(torch.view_as_real(memory), generator)
    elif not memory.dtype.is_floating_point:
        memory.fill_(memory.dtype == torch.bool)
    elif memory.dtype.itemsize > 1:
        memory.normal_(generator=generator)
    elif memory.dtype in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        # Scales are powers of two, around 1; two numbers of four bits are any byte.
        low, high = (123, 132) if memory.dtype == torch.float8_e8m0fnu else (0, 256)
        memory.view(torch.uint8).random_(low, high, generator=generator)
    else:
        values = torch.empty(memory.shape, device=memory.device).normal_(generator=generator)
        memory.copy_(values)


def _lane(function: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """A function of the call's arguments and a tensor: the method between a sum and a residual sum, as in a model.

    A compiler can fuse these with the host's code, and not with a kernel of ours, which so pays for them.
    """
    module, first = call.module, call.args[0] if call.args else None
    if isinstance(first, Leaf) and first.dtype.is_floating_point and len(first.shape) > 1:

        def run(before: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            x = x + before
            out = function(module, x, *args, **kwargs)
            return out + x if isinstance(out, torch.Tensor) and out.shape == x.shape else out

    else:

        def run(before: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
            return function(module, *args, **kwargs)

    run.__code__ = run.__code__.replace()  # torch.compile limits the recompilations of a code object
    return run


@contextmanager
def _nested(graphs: bool) -> Iterator[None]:
    """Let code run and be compiled while Dynamo traces other code."""
    found = _state.found
    _state.modes.append(graphs)
    try:
        with tracing(None), torch.no_grad():
            yield
    finally:
        _state.modes.pop()
        _state.found = found


def _measured(
    call: Call, theirs: Callable[..., Any], ours: Callable[..., Any], device: torch.device
) -> dict[str, Any]:
    """{ours: whether it runs, text, bytes: memory that was reserved for it}. Raises _Unknown."""
    log.info("%s is measured against ours, both compiled (FASTKERNELS_VERIFY=0: never)", call)
    generator = torch.Generator(device).manual_seed(0)
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    with measuring(call.module), _nested(call.graphs):
        try:
            tensors: dict[int, torch.Tensor] = {}
            args = _made(call.args, tensors, generator)
            kwargs = _made(call.kwargs, tensors, generator)
            before = torch.zeros_like(tensors[0]) if tensors else torch.zeros((), device=device)
            lanes: list[Callable[[], Any]] = []
            for function in (theirs, ours):
                side = torch.compile(_lane(function, call), fullgraph=True, dynamic=False, **call.how)
                lanes.append(partial(side, before, *args, **kwargs))
            want, got = (lane() for lane in lanes)
            if (reason := different(got, want)) is not None:
                return {"ours": False, "text": f"the host's; {reason}", "bytes": _more(device, reserved)}
            del want, got
            calls: list[list[Any]] = [[]] * CALLS
            rounds = ROUNDS if device.type == "cuda" else CPU_ROUNDS
            gpu = Ratio.of(*reversed(interleaved(lanes, calls, device, rounds)))
            won, text = gpu.low > 1.0, f"{gpu.value:.3f} ({gpu.low:.3f} to {gpu.high:.3f})"
            if device.type == "cuda" and not call.graphs:
                whole, issued = one_by_one(lanes, device, rounds)
                cpu = Ratio.of(*reversed(issued))
                waits = min(issued[1]) > CPU_BOUND * min(whole[1])
                won = wins_without_graphs(gpu, cpu, waits)
                text += f", CPU {cpu.value:.3f} ({cpu.low:.3f} to {cpu.high:.3f})"
            whose = "ours" if won else "the host's"
            return {"ours": won, "text": f"{whose} ({text})", "bytes": _more(device, reserved)}
        except torch.OutOfMemoryError as error:
            raise _Unknown(f"too little free memory: {_said(error)}") from error
        except Exception as error:  # of a kernel, a compiler or a capture
            raise _Unknown(_said(error)) from error


def wins_without_graphs(gpu: Ratio, cpu: Ratio, waits: bool) -> bool:
    """Whether ours is faster if the CPU launches each kernel. Ratios are of the host's time over ours.

    waits  whether calls may wait for the CPU: then neither time may be longer, and one has to be shorter
    """
    if not waits:
        return gpu.low > 1.0
    return (gpu.low > 1.0 and cpu.value >= 1.0) or (cpu.low > 1.0 and gpu.value >= 1.0)


def _more(device: torch.device, reserved: int) -> int:
    """Bytes of device memory that PyTorch took since; they are returned after the outermost measurement."""
    return max(torch.cuda.memory_reserved(device) - reserved, 0) if device.type == "cuda" else 0


def _said(error: BaseException) -> str:
    """The type and the first line of an error, or of the one that a compiler has wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
