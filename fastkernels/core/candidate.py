"""A user's kernel: one file that offers the op's function, a module class with our class's name, or both.

A folder of such files, each with the name of its op, is a set of candidates that are used together.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastkernels.core import registry

if TYPE_CHECKING:
    from fastkernels.core.candidate_scopes import Installed, Scope
    from fastkernels.core.dispatch import Op


log = logging.getLogger("fastkernels")
MODULES = "fastkernels_candidate_"  # the beginning of the names of modules of candidates


class CandidateError(ValueError):
    """The candidate file cannot be used; the message says why and what it must offer."""


class NothingOffered(CandidateError):
    """The candidate file has neither the op's function nor one of its classes."""


class WrongOutput(CandidateError):
    """A candidate's function has returned other shapes, dtypes or numbers of tensors than the op, or has left a setting
    of torch changed.
    """


@dataclass(frozen=True)
class Candidate:
    """A loaded candidate file: `function` replaces the op everywhere, `classes` replace modules."""

    op: str
    path: str
    function: Callable[..., Any] | None
    classes: dict[str, type]
    module: ModuleType

    @property
    def kind(self) -> str:
        return "+".join(k for k, v in (("function", self.function), ("class", self.classes)) if v)


def load(op: str, path: str) -> Candidate:
    """Import the file at `path` (its code runs) and find what it offers for `op`.

    Raises UnknownName for the op, CandidateError for a file that is missing or does not import, NothingOffered.
    """
    spec = registry.get(op)
    file = file_of(op, path)
    module = _import(op, file)
    function = _functions.setdefault(module.__name__, getattr(module, op, None))
    if function is not None and not callable(function):
        raise CandidateError(f"candidate {path}: {op} is {type(function).__name__}, not a function")
    names = {t.cls for t in spec.targets}
    classes = {n: getattr(module, n) for n in names if isinstance(getattr(module, n, None), type)}
    if function is None and not classes:
        offers = ", ".join(sorted(names)) or "no class"
        raise NothingOffered(
            f"candidate {path} offers neither a function {op}(...) nor a class ({offers}){_meant(module, names)}"
        )
    for name, cls in classes.items():
        if (problem := _uncallable(cls, registry.op_class(op, name))) is not None:
            raise NothingOffered(f"candidate {path}: {name} {problem}")
    return Candidate(op, str(file), function, classes, module)


def file_of(op: str, path: str | os.PathLike[str]) -> Path:
    """The file of an op's candidate. Raises CandidateError if there is none."""
    file = _there(path)
    if file is None or not file.is_file():
        raise CandidateError(f"candidate for {op}: there is no file {os.fspath(path):.200}")
    return file


def _there(path: str | os.PathLike[str]) -> Path | None:
    """The file or folder at a path. None if there is none, as for a kernel's text or ~NAME of no user."""
    try:
        found = Path(path).expanduser()
        return found if found.exists() else None
    except (OSError, RuntimeError):  # a name that is too long, or no home
        return None


def _meant(module: ModuleType, names: Iterable[str]) -> str:
    """Our names for a class of the file that has a host's own name, such as VllmRMSNorm for RMSNorm."""
    for own, value in vars(module).items():
        defined = isinstance(value, type) and value.__module__ == module.__name__
        if defined and (meant := [name for name in sorted(names) if name.endswith(own)]):
            return f"; to replace a host's {own}, name it {' or '.join(meant)}"
    return ""


def _uncallable(cls: type, ours: Any) -> str | None:
    """Why a candidate's class cannot be called as ours; None if it can. Optional arguments may be missing."""
    expected, given = _forward(ours), _forward(cls)
    if expected is None:
        return None  # a seam with methods of other names
    if given is None:
        return f"has no method forward{inspect.signature(expected)}"
    try:
        wanted = inspect.signature(expected)
        required = [p for p in wanted.parameters.values() if p.default is p.empty and p.kind in _POSITIONAL]
        inspect.signature(given).bind(*[None] * (len(required) - (not _takes_self(cls))))
    except TypeError as error:
        return f"cannot be called as forward{wanted}: {error}"
    except ValueError:  # no signature: the first call will show
        return None
    return None


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _takes_self(cls: type) -> bool:
    """Whether `forward` is a method of the object: not a static one, nor an object that is called."""
    found = inspect.getattr_static(cls, "forward")
    return hasattr(found, "__get__") and not isinstance(found, staticmethod | classmethod)


def _forward(cls: Any) -> Callable[..., Any] | None:
    """The method `forward` of a module's class, unless it is the one of nn.Module, which only raises."""
    found = getattr(cls, "forward", None) if isinstance(cls, type) else None
    plain = getattr(found, "__name__", "") == "_forward_unimplemented"
    return found if callable(found) and not plain else None


def fit(function: Callable[..., Any], op: Op) -> tuple[Callable[..., Any], Callable[..., str | None] | None]:
    """A candidate's function as the op calls it, and which calls it supports (None: all).

    A function without the op's last optional arguments, written before they existed, is called without them; calls
    with values other than their defaults are unsupported. Raises CandidateError if the function cannot be called.
    """
    import torch

    arguments = op.overload._schema.arguments
    names, required = [a.name for a in arguments], sum(not a.has_default_value() for a in arguments)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function, None  # a builtin without a signature: the first call will show
    if (problem := _misplaced(signature, names)) is not None:
        written = ", ".join(
            f"{a.name}={a.default_value!r}" if a.has_default_value() else a.name for a in arguments
        )
        raise CandidateError(f"{problem}: the op is called by position, as {op.name}({written})")
    try:
        taken = max((n for n in range(required, len(names) + 1) if _binds(signature, n)), default=len(names))
        for count in (taken, required):
            signature.bind(*[None] * count)
    except TypeError as error:
        raise CandidateError(
            f"{op.name}(...) does not take the op's arguments ({', '.join(names)}): {error}"
        ) from None
    if taken == len(names):
        return function, None
    lacking = arguments[taken:]

    def supports(*args: Any) -> str | None:
        for place, (argument, value) in enumerate(zip(lacking, args[taken:], strict=False)):
            default = argument.default_value
            if value is not default and (isinstance(value, torch.Tensor) or value != default):
                missing = ", ".join(f"{a.name}={a.default_value!r}" for a in lacking[: place + 1])
                return (
                    f"this call of {op.name} needs the argument {argument.name}, which the candidate's function"
                    f" does not take: add {missing} after {names[taken - 1]}"
                )
        return None

    return lambda *args: function(*args[:taken]), supports


# Names that kernels give to the same argument
_SYNONYMS = {"epsilon": "eps", "variance_epsilon": "eps", "w": "weight", "res": "residual"}


def _misplaced(signature: inspect.Signature, names: Sequence[str]) -> str | None:
    """A parameter that is named like an argument of the op at another place; None if there is none."""
    own = [_SYNONYMS.get(p.name, p.name) for p in signature.parameters.values() if p.kind in _POSITIONAL]
    for place, (mine, name) in enumerate(zip(own, names, strict=False)):
        if mine != name and mine in names and own.count(mine) == 1:
            return f"argument {place + 1} is {name}, and the candidate's function has {mine} there"
    return None


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


CHANGES = "changes {} for all code of the process: restore it before the end, or leave it alone"
CHECKED = 64  # kinds of calls whose outputs are compared with the op's


def checked(function: Callable[..., Any], op: Op, path: str) -> Callable[..., Any]:
    """The function, which raises WrongOutput for outputs that are not the op's.

    The first call of a kind is checked, for CHECKED kinds; later ones cost a look-up. Calls of a kind have the same
    shape and dtype of the first argument, and give the same optional arguments.
    """
    from fastkernels.core import settings

    seen = set[Any]()

    def run(*args: Any) -> Any:
        first = args[0] if args else None
        kind = getattr(first, "shape", None), getattr(first, "dtype", None), *[a is None for a in args]
        if kind in seen or len(seen) >= CHECKED:
            return function(*args)
        before = settings.now()
        try:
            found = function(*args)
        finally:  # other code runs after an error, too
            if left := settings.changed(before):
                settings.restore(before)
        seen.add(kind)
        if left:
            raise WrongOutput(f"candidate {path}: a call of {op.name} {CHANGES.format(left)}")
        if (problem := _unlike(found, op, args)) is not None:
            raise WrongOutput(f"candidate {path}: {op.name} returns {problem}")
        return found

    return run


def _unlike(found: Any, op: Op, args: Sequence[Any]) -> str | None:
    """'SHAPES, not SHAPES' if an op's result is not what its shape function says; None if it is, or cannot be told."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    if op.fake is None:
        return None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            wanted = op.fake(*tree_map_only(torch.Tensor, mode.from_tensor, tuple(args)))
    except Exception:  # shapes that depend on values
        return None
    one, other = _outputs(found), _outputs(wanted)
    return None if one == other else f"{one}, not {other}"


def _outputs(found: Any) -> str:
    import torch

    if isinstance(found, (list, tuple)):
        return f"({', '.join(map(_outputs, found))})"
    if not isinstance(found, torch.Tensor):
        return "None" if found is None else type(found).__name__
    return f"{list(found.shape)} {str(found.dtype).removeprefix('torch.')} on {found.device.type}"


_functions: dict[str, Any] = {}  # of the modules loaded, as they were: `install` puts another in their place
_users: dict[str, set[Installed]] = {}  # {module of a file: its installations}


def install(found: Candidate, note: Callable[[Callable[[], None]], None], scope: Scope | None = None) -> bool:
    """Run the candidate's function in the op's calls of a scope, its own file's classes included; None: in all calls.

    The classes' calls go through the op, too: there they are counted, and compilers see one operator. `note` gets the
    undo before anything changes; undos may run in any order. False, and nothing is changed, for a candidate or an op
    without function. Raises CandidateError; see `fit`.
    """
    op, function = registry.get(found.op).op, found.function
    if op is None or function is None:
        return False
    try:
        fitted, supports = fit(function, op)
    except CandidateError as error:
        raise CandidateError(f"candidate {found.path}: {error}") from None
    file, names = found.module.__name__, vars(found.module)
    made = op.installation(checked(fitted, op, found.path), f"candidate {found.path}", supports, scope, file)
    users = _users.setdefault(file, set())

    def undo() -> None:
        op.remove(made)
        users.discard(made)
        if not users:
            names[found.op] = function

    note(undo)
    users.add(made)
    op.install(made)
    names[found.op] = lambda *args, **kwargs: op.overload(*args, **kwargs)
    return True


def is_block(name: str) -> bool:
    """Whether a name is that of a block of a model, MODEL.KIND; the model's own process knows which there are."""
    return "." in name


def _check_form(candidates: Any) -> None:
    """Raise CandidateError for what is neither a mapping with names nor a path."""
    named = isinstance(candidates, Mapping) and all(isinstance(name, str) for name in candidates)
    if not named and not isinstance(candidates, (str, os.PathLike)):
        raise CandidateError(
            f"candidates must be a folder of files OP.py, or {{op: file}}, got {candidates!r:.80}"
        )


def named_in(candidates: Mapping[str, Any] | str | os.PathLike[str] | None) -> list[str]:
    """The names of a mapping's or a folder's candidates, unchecked. Raises CandidateError for other objects."""
    if candidates is not None:
        _check_form(candidates)
    if candidates is None or isinstance(candidates, Mapping):
        return list(candidates or ())
    folder = _there(candidates)
    files = sorted(folder.glob("*.py")) if folder is not None else []
    return [f.stem for f in files if not f.name.startswith("_")]


def from_directory(path: str | os.PathLike[str], blocks: bool = False) -> dict[str, str]:
    """{op: file} of a folder: every .py file in it whose name does not begin with '_' is named after an op.

    blocks  accept names of blocks, MODEL.KIND, unchecked

    Nothing is imported. Raises CandidateError for a folder that is not there or has none, and for other .py files.
    """
    folder = _there(path)
    if folder is not None and folder.is_file():
        raise CandidateError(f"candidates: {path} is a file; give a folder of files OP.py, or {{op: file}}")
    if not os.fspath(path) or folder is None or not folder.is_dir():
        raise CandidateError(f"candidates: there is no folder {os.fspath(path)[:200] or repr(path)}")
    files = sorted(f for f in folder.glob("*.py") if not f.name.startswith("_"))
    if not files:
        raise CandidateError(f"candidates: the folder {path} has no file OP.py; `fk-bench stubs` makes some")
    wrong = [_unknown(f.stem) for f in files if not (registry.known(f.stem) or (blocks and is_block(f.stem)))]
    if wrong:
        raise CandidateError(
            f"candidates: not named after an op in {path}: {', '.join(wrong)}. Rename them, or begin the names of"
            " helpers with '_'"
        )
    if other := [f for f in files if not f.is_file()]:  # reading a pipe never ends
        raise CandidateError(
            f"candidates: {other[0]} is not a file; a candidate is a regular file or a link to one"
        )
    return {f.stem: str(f) for f in files}


def sources_folder(file: Path) -> Path:
    """The folder with a candidate's own sources: _OP next to OP.py. It need not exist."""
    return file.parent / f"_{file.stem}"


def sources(file: Path) -> list[Path]:
    """All files in a candidate's folder of sources, sorted."""
    return sorted(p for p in sources_folder(file).rglob("*") if p.is_file())


def _unknown(stem: str) -> str:
    close = difflib.get_close_matches(stem, registry.op_modules(), n=1)
    return f"{stem}.py" + (f" (did you mean {close[0]}.py?)" if close else "")


def resolve(candidates: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, str]:
    """{op: file} of a mapping, or of a folder. Raises UnknownName for an op, CandidateError for a folder, a file that
    is not there, or an object of another kind.
    """
    if candidates is None:
        return {}
    _check_form(candidates)
    if isinstance(candidates, Mapping):
        registry.check_names(candidates)
        for op, path in candidates.items():
            if not isinstance(path, str | os.PathLike):
                raise CandidateError(f"candidate for {op}: expected the path of a file, got {path!r:.80}")
            file_of(op, path)
        return {op: str(path) for op, path in candidates.items()}
    return from_directory(candidates)


def _import(op: str, file: Path) -> ModuleType:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    name = f"{MODULES}{op.replace('.', '_')}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    from fastkernels.core import settings

    before = settings.now()
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):  # it would end the host's process without a word
            raise CandidateError(
                f"candidate {file} calls sys.exit({error.code!r}) while it is imported"
            ) from error
        if not isinstance(error, Exception):
            raise
        raise CandidateError(f"candidate {file} does not import: {type(error).__name__}: {error}") from error
    finally:
        if left := settings.changed(before):  # many files of benchmarks set precisions at their top
            settings.restore(before)
            log.warning(
                "candidate %s: its import changes %s for all code of the process: restored", file, left
            )
    return module
