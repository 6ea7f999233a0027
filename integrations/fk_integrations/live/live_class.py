"""Subclasses of a host's classes that run our methods."""

from __future__ import annotations

import copy
import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib.util import resolve_name
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from fastkernels.core import candidate
from fastkernels.core.dispatch import proving
from fastkernels.core.reasons import Kind, Reason
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fk_integrations.core.instance_class import bind_methods, change_class
from fk_integrations.core.journal import Journal
from fk_integrations.live.decorated import host_function, plain_function, redecorated, wrapper
from fk_integrations.live.eager_steps import PINNED, THEIRS, captured_only
from fk_integrations.live.tally import Tally, calling, counted
from fk_integrations.live.trials import Trial, choosing, hosts_first, sizes_of

_LIVE: dict[tuple[type, type, bool, str, bool, Callable[[], bool] | None, str], type] = {}
_CLASS: Any = vars(object)["__class__"]
_CALLS = "fastkernels_calls"  # of classes that call a function of ours
_PLAIN = "fastkernels_plain"  # of these classes: their methods without what counts them
PREPARED = "_fastkernels_prepared"  # the names that a candidate's `prepare` has added to an object
_NO_NAMES: frozenset[str] = frozenset()
_SHORT = 256  # names of a function that an instruction of two bytes can read


def live_class(
    host_class: type, ours: type, by_table: bool = False, trial: Trial | None = None, differentiable: str = "",
    captures: Callable[[], bool] | None = None, candidates: str = "",
) -> type:  # fmt: skip
    """A subclass of the host's class with our methods; its constructor, loaders and isinstance checks stay.

    `ours.live_methods` names the methods, default ("forward",); a candidate may leave the list to the class that it
    replaces. Of a candidate that derives from the host's class, all methods that it defines are live.

    by_table: wrap each method in `ours.by_table(theirs, ours)`, which picks one of the two per call by a tuned table.
    trial: `trials.choosing` wraps each method and picks by the time of first calls.
    differentiable: the op, if calls may need gradients; `inference_only` wraps each method, and `counted` counts its
    calls. A trial implies it.
    captures: whether the host captures a graph now; `captured_only` wraps each method.
    candidates: the functions of a patch; torch.compile shares code among modules of one class.
    """
    op = trial.op if trial is not None else differentiable
    key = (host_class, ours, by_table, op, trial is not None, captures, candidates)
    if key not in _LIVE:
        methods = {name: getattr(ours, name) for name in _method_names(host_class, ours)}
        if by_table:
            choose = ours.by_table  # type: ignore[attr-defined]
            methods = {name: choose(getattr(host_class, name), own) for name, own in methods.items()}
        if trial is not None:
            methods = {n: choosing(getattr(host_class, n), own, op, n) for n, own in methods.items()}
        if op:
            needs = getattr(ours, "needs_host", None)
            methods = {n: inference_only(getattr(host_class, n), m, op, needs) for n, m in methods.items()}
            methods = {n: counted(m) for n, m in methods.items()}
        if trial is not None:
            methods = {n: hosts_first(getattr(host_class, n), m) for n, m in methods.items()}
        if captures is not None:
            methods = {n: captured_only(getattr(host_class, n), m, captures) for n, m in methods.items()}
        body = {
            **methods,
            **_copies(host_class),
            "__prepare_scriptable__": _refuse_to_script,
            **({"__class__": _shown_as(host_class)} if op else {}),
            "__module__": host_class.__module__,
            "__qualname__": host_class.__qualname__,
            "fastkernels": ours,
            "fastkernels_tried": trial is not None,
        }
        _LIVE[key] = type(host_class.__name__, (host_class,), body)
    return _LIVE[key]


def _refuse_to_script(self: Any) -> Any:
    """Called by torch.jit.script, which compiles source code and finds no functions of other modules there.

    It would put a copy of the host's class into the model itself, so none is offered.
    """
    raise RuntimeError(
        f"torch.jit.script cannot compile the patched {type(self).__qualname__}: undo the patch first, with"
        " report.undo() or fastkernels.unpatch(model). torch.jit.trace and torch.export record the host's code"
    )


def _shown_as(host_class: type) -> property:
    """`__class__` of an object: the host's class, by which hosts and PyTorch look objects up or derive classes."""
    return property(lambda self: host_class, lambda self, cls: _CLASS.__set__(self, cls))


def _copies(host_class: type) -> dict[str, Callable[..., Any]]:
    """Methods with which copies and pickles of an object are the host's: an undo of the original cannot reach them.

    A pickle then loads without FastKernels. A class of the host with methods of its own for this keeps them.
    """
    host: Any = _host_of(host_class)
    plain = all(
        getattr(host, name, None) is getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__")
    )

    def reduced(self: Any, protocol: Any) -> Any:
        # Later protocols accept an object's own class only. Objects without attributes have no state.
        found: Any = object.__reduce_ex__(self, 1) if plain else host.__reduce_ex__(self, protocol)
        if not isinstance(found, tuple):
            return found
        make, given, *states = found
        given = tuple(host if value is type(self) else value for value in given)
        return host if make is type(self) else make, given, *map(_without_ours, states)

    def copied(self: Any) -> Any:
        theirs = getattr(host, "__copy__", None)
        return _as_host(theirs(self) if theirs is not None else _rebuilt(host, self, dict(vars(self)), {}))

    def deeply_copied(self: Any, memo: dict[int, Any]) -> Any:
        theirs = getattr(host, "__deepcopy__", None)
        if theirs is not None:
            return _as_host(theirs(self, memo))
        return _rebuilt(host, self, None, memo)

    return {"__reduce_ex__": reduced, "__copy__": copied, "__deepcopy__": deeply_copied}


def _rebuilt(host: type, of: Any, state: dict[str, Any] | None, memo: dict[int, Any]) -> Any:
    """An object of the host's class with this state, or with a deep copy of the state of `of`."""
    made: Any = object.__new__(host)
    memo[id(of)] = made
    state = copy.deepcopy(_without_ours(vars(of)), memo) if state is None else _without_ours(state)
    getattr(made, "__setstate__", vars(made).update)(state)
    bind_methods(made, type(of), host)
    return made


def _without_ours(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    ours = state.get(PREPARED, _NO_NAMES)
    kept = {k: v for k, v in state.items() if k not in ours and not str(k).startswith("_fastkernels")}
    if THEIRS in state:  # ours would call the copy's own pinned method, which is ours
        kept[PINNED] = state[THEIRS]
    for table in ("_parameters", "_buffers", "_modules") if ours else ():
        if isinstance(kept.get(table), dict):
            kept[table] = {k: v for k, v in kept[table].items() if k not in ours}
    return kept


def _host_of(cls: type) -> type:
    """The first class that is not ours."""
    return next(c for c in cls.__mro__ if not is_ours(c))


def _as_host(made: Any) -> Any:
    """An object that the host's own method has copied, of the host's class."""
    if is_ours(type(made)):
        change_class(made, _host_of(type(made)))
    if hasattr(made, "__dict__"):
        kept = _without_ours(vars(made))
        vars(made).clear()
        vars(made).update(kept)
    return made


def _method_names(host_class: type, ours: type) -> set[str]:
    forward = {"forward"} if hasattr(ours, "forward") else set()
    if hasattr(ours, "live_methods"):
        return {*ours.live_methods, *forward}
    if issubclass(ours, host_class) and ours.__module__.startswith(candidate.MODULES):
        added = ours.__mro__[: ours.__mro__.index(host_class)]
        own = {n for cls in added for n, v in vars(cls).items() if isinstance(v, FunctionType)}
        return {n for n in own if not n.startswith("__")} | forward
    return forward or set(getattr(host_class, "live_methods", ("forward",)))


def replace_attribute(
    holder: Any, name: str, ours: type, methods: tuple[str, ...], journal: Journal, by_table: bool = False,
    trial: Trial | None = None, differentiable: str = "", tally: Tally | None = None,
    captures: Callable[[], bool] | None = None,
) -> Reason | None:  # fmt: skip
    """Replace the object `holder.name` with one of our class and the same state; None, or why not.

    methods: an instance that has one of these as an attribute of its own was patched by other code.
    """
    old = getattr(holder, name)
    if patched := [m for m in methods if m in vars(old)]:
        return Reason(Kind.REPLACED, f"its {name}.{patched[0]} was replaced by other code")
    functions = "" if tally is None else tally.scope.candidates
    new: Any = object.__new__(
        live_class(type(old), ours, by_table, trial, differentiable, captures, functions)
    )
    vars(new).update(vars(old))
    live = type(new)

    def back() -> None:
        # The user may hold ours, to put it back later: unfuse_qkv_projections does.
        change_class(new, type(old))
        kept = {key: value for key, value in vars(new).items() if not key.startswith("_fastkernels")}
        same = kept.keys() == vars(old).keys() and all(kept[key] is vars(old)[key] for key in kept)
        found = getattr(holder, name)
        # Of another class: set since, e.g. an adapter's. Of ours: diffusers makes objects of the same class again.
        if type(found) is live or (found is new and same):
            setattr(holder, name, old)

    journal.add(back)
    setattr(holder, name, new)
    if tally is not None:
        tally.add(holder, new, journal)
    if trial is not None:
        trial.begin(new, sizes_of(holder), back, journal)
    return None


@cache
def inference_only(
    theirs: Callable[..., Any], ours: Callable[..., Any], op: str, needs: Callable[[Any], str | None] | None = None
) -> Callable[..., Any]:  # fmt: skip
    """Make a function that runs `ours`, but `theirs` in a call that needs gradients: our kernels compute none.

    A call needs gradients if one of its tensors, or a parameter of a module among its arguments, requires them; in
    forward mode every call does. `theirs` also runs in torch.func.vmap, under an exporter, whose result must not need
    our ops, and if needs(self) is a reason: why the parts that ours does not call have to run, as they are now. So it
    does where ours raises UnsupportedArgument.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if exporting():
            _leave_to_exporter(op)
            return theirs(*args, **kwargs)
        backward = torch.is_grad_enabled() and (_requires_grad(args) or _requires_grad(kwargs.values()))
        if backward or forward_ad._current_level >= 0:
            _note(op, "the call needs gradients; inference runs ours in torch.no_grad()")
            return theirs(*args, **kwargs)
        if not torch.compiler.is_compiling() and peek_interpreter_stack() is not None:
            _note(op, "torch.func transforms the call")
            return theirs(*args, **kwargs)
        if needs is not None and (reason := needs(args[0])) is not None:
            _note(op, reason)
            return theirs(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except UnsupportedArgument as refused:
            _note(op, str(refused))
        return theirs(*args, **kwargs)

    return wrapper(run, ours)


@torch._dynamo.assume_constant_result
def exporting() -> bool:
    """Whether an exporter records the call.

    Runs also while Dynamo traces: that of torch 2.11 takes is_exporting() in traced code for true. A tracer of torch.fx
    calls modules with proxies, which have no values to choose by.
    """
    return torch.compiler.is_exporting() or torch.jit.is_tracing() or is_fx_symbolic_tracing()


@torch._dynamo.assume_constant_result
def _leave_to_exporter(op: str) -> None:
    """Count a place that torch.export, torch.jit.trace, torch.fx or an ONNX exporter records."""
    for found in proving(op)[:1]:
        found.leave("an exporter records the host's code")


def _requires_grad(values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            found = value.requires_grad
        elif isinstance(value, torch.nn.Module):
            found = _requires_grad(value.parameters())
        elif isinstance(value, (tuple, list)):
            found = _requires_grad(value)
        else:
            found = isinstance(value, dict) and _requires_grad(value.values())
        if found:
            return True
    return False


@torch._dynamo.assume_constant_result
def _note(op: str, reason: str) -> None:
    """Count a call that runs the host's code; in compiled code once, while it is traced."""
    for found in proving(op)[:1]:
        found.note(reason)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _renamed(code: CodeType, names: set[str], new: str) -> CodeType:
    """The code, with functions inside it, with another name in the place of these."""
    inside = tuple(_renamed(c, names, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_names=tuple(new if n in names else n for n in code.co_names), co_consts=inside)


@cache
def _only_global(code: CodeType) -> tuple[str, ...]:
    """The names that the code, with functions inside it, loads as globals and uses in no other way."""
    kinds: dict[str, set[str]] = {}
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.argval in part.co_names:
                kinds.setdefault(step.argval, set()).add(step.opname)
    return tuple(name for name, how in kinds.items() if how == {"LOAD_GLOBAL"})


@dataclass(frozen=True)
class _Import:
    """`from module import name` inside a function; `offset` is that of the instruction that reads the name."""

    offset: int
    module: str
    level: int
    name: str

    def found(self, function: FunctionType) -> Any:
        """The value of the name in the module; None if that is not loaded."""
        module = sys.modules.get(self.file(function))
        return None if module is None else vars(module).get(self.name)

    def file(self, function: FunctionType) -> str:
        if not self.level:
            return self.module
        package = function.__globals__.get("__package__")
        return resolve_name("." * self.level + self.module, package) if package else ""


@cache
def _imports(code: CodeType) -> tuple[_Import, ...]:
    """The names that the code imports when it runs. Code with names enough for longer instructions has none."""
    found: list[_Import] = []
    steps, names, module = list(dis.get_instructions(code)), (), ("", 0)
    for at, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            names, module = steps[at - 1].argval or (), (step.argval, steps[at - 2].argval)
        elif step.opname == "IMPORT_FROM" and step.argval in names and len(code.co_names) < _SHORT:
            found.append(_Import(step.offset, *module, step.argval))
    return tuple(found)


def calls(cls: type, method: str = "forward") -> list[tuple[str, str, Any]]:
    """(module, name in it, function) of the functions that a method of the class calls by name.

    These are global names of its file, and names that it imports when it runs from modules that are loaded.
    """
    forward = plain_function_of(cls, method)
    if not isinstance(forward, FunctionType):
        return []
    known = forward.__globals__
    found = [(known.get("__name__", ""), name, known.get(name)) for name in _only_global(forward.__code__)]
    found += [(i.file(forward), i.name, i.found(forward)) for i in _imports(forward.__code__)]
    return [each for each in found if plain_function(each[2]) is not None]


def called(cls: type, method: str = "forward") -> dict[str, Any]:
    """{name: function} of `calls`."""
    return {name: function for _, name, function in calls(cls, method)}


def _plain_method(cls: type, name: str) -> Any:
    """A method of a class without our counting around it; None if there is none."""
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base).get(_PLAIN, {}).get(name, getattr(cls, name))
    return None


def plain_function_of(cls: type, method: str) -> Any:
    """The host's function that a method of the class runs in the end."""
    return host_function(_plain_method(cls, method))


def callers(cls: type) -> dict[Any, tuple[str, ...]]:
    """{function: the methods of the class that call it by name}. Of inherited methods, forward alone counts."""
    own = list(itertools.takewhile(is_ours, cls.__mro__))
    own.append(cls.__mro__[len(own)])
    names = [n for base in own for n, value in vars(base).items() if isinstance(value, FunctionType)]
    found: dict[Any, tuple[str, ...]] = {}
    for name in dict.fromkeys([*names, "forward"]):
        for function in dict.fromkeys(function for _, _, function in calls(cls, name)):
            found[function] = (*found.get(function, ()), name)
    return found


@cache
def until_replaced(
    theirs: Any, ours: Callable[..., Any], op: str, name: str, file: str
) -> Callable[..., Any]:
    """Make a function that runs `ours`, until other code replaces the function `name` of the host's file."""
    namespace = vars(sys.modules[file])

    def run(*args: Any, **kwargs: Any) -> Any:
        found = namespace[name]
        if found is theirs:
            return ours(*args, **kwargs)
        _note(op, f"{name} was replaced by other code after the patch")
        return found(*args, **kwargs)

    return wrapper(run, ours)


@cache
def or_theirs(theirs: Any, ours: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Make a function that runs `ours`, but `theirs` in a call whose arguments ours refuses; a fallback."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs)
        except UnsupportedArgument as refused:
            _note(op, str(refused))
        return theirs(*args, **kwargs)

    return wrapper(run, ours)


def calling_class(
    cls: Any, theirs: Any, ours: Any, methods: tuple[str, ...] = ("forward",), candidates: str = ""
) -> type:
    """A subclass whose methods are the class's, with a name of our own in the place of that of `theirs`.

    If `counted_function` made `ours`, it counts for the object whose method calls it.

    The name is a new global of the class's file. With other globals, torch.compile would not find what forward calls.
    A method that imports `theirs` when it runs imports the new name from the same module.
    candidates: see live_class.
    """
    return _calling_class(cls, theirs, ours, tuple((n, _plain_method(cls, n)) for n in methods), candidates)


@cache
def _calling_class(
    cls: Any, theirs: Any, ours: Any, methods: tuple[tuple[str, Any], ...], candidates: str
) -> type:
    new, plain = f"_fastkernels_{ours.__name__}", {}
    for method, decorated in methods:
        old = host_function(decorated)
        names = {n for n in _only_global(old.__code__) if old.__globals__.get(n) is theirs}
        code = old.__code__
        if names:
            code = _renamed(code, names, new)
            old.__globals__[new] = ours
        if imports := [i for i in _imports(old.__code__) if i.found(old) is theirs]:
            code = _importing(code, imports, new)
            for each in imports:
                setattr(sys.modules[each.file(old)], new, ours)
        function = FunctionType(code, old.__globals__, old.__name__, old.__defaults__, old.__closure__)
        function.__kwdefaults__ = old.__kwdefaults__
        update_wrapper(function, old)
        del function.__wrapped__  # type: ignore[attr-defined]
        plain[method] = redecorated(decorated, function)
    made = {name: calling(function) for name, function in plain.items()}
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        **made,
        _CALLS: ours,
        _PLAIN: plain,
    }
    return type(cls.__name__, (cls,), {**_copies(cls), **body})


def _importing(code: CodeType, imports: list[_Import], name: str) -> CodeType:
    """The code with another name at these imports. Each keeps its place, since one byte has the number of a name."""
    steps = bytearray(code.co_code)
    for each in imports:
        steps[each.offset + 1] = len(code.co_names)
    return code.replace(co_code=bytes(steps), co_names=(*code.co_names, name))


def called_function_of(cls: type) -> Any:
    """Our function that a class of `calling_class` calls; None for any other class."""
    return vars(cls).get(_CALLS)


def restore(model: Any) -> bool:
    """Give the modules of a model and their processors the host's classes, without the journal of their patch.

    Whether any was ours.
    """
    changed = False
    for module in model.modules():
        for found in (module, vars(module).get("processor")):
            while is_ours(type(found)):
                change_class(found, type(found).__mro__[1])
                changed = True
    return changed


def parts(owner: Any, depth: int) -> Iterator[Any]:
    """Objects that are not modules, in a module's attributes: methods, schemes, their kernels."""
    for name, value in vars(owner).items():
        if depth and hasattr(value, "__dict__") and not name.startswith("_") and not callable(value):
            yield value
            yield from parts(value, depth - 1)


def is_ours(cls: type) -> bool:
    """Whether a class was made by a patch of a live object."""
    return "fastkernels" in vars(cls) or _CALLS in vars(cls)
