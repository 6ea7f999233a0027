"""Record how the modules of a model were constructed: class, arguments by name, and count."""

from __future__ import annotations

import inspect
import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

LAYER_NUMBERS = ("layer_id", "layer_idx")  # the layers of a model count as one
PLAIN = (bool, int, float, type(None))


class Modules:
    """Modules constructed inside `record_modules`; modules that were deleted since do not count."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
        self._stock: Any = None

    def start(self) -> None:
        """Start to record every module constructed in this process, of any host."""
        self._stock = stock = nn.Module.__init__

        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.see(module, sys._getframe(1))
            stock(module, *args, **kwargs)

        nn.Module.__init__ = __init__  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        nn.Module.__init__ = self._stock  # type: ignore[method-assign]

    def see(self, module: nn.Module, frame: FrameType | None) -> None:
        """Find the constructor's arguments in `frame`, the caller of nn.Module.__init__, or above it."""
        named = outermost = None
        while frame is not None and _constructs(frame, module):
            outermost = frame
            if not frame.f_code.co_flags & inspect.CO_VARARGS:  # not a wrapper, whose arguments have no names
                named = frame
            frame = frame.f_back
        kind = type(module)
        if outermost is None or kind.__module__.partition(".")[0] == "torch" or module in self._made:
            return
        path = f"{kind.__module__}:{kind.__qualname__}"
        self._made[module] = path, json.dumps(_arguments(named or outermost))

    def rows(self, model: nn.Module | None = None) -> list[dict[str, Any]]:
        """[{'cls': 'module.path:Name', 'args': {name: value}, 'count': how many}], in order of construction.

        model: only its modules (a host may build others: without memory, or at import).
        """
        inside = None if model is None else set(model.modules())
        counts = Counter(made for module, made in self._made.items() if inside is None or module in inside)
        return [{"cls": path, "args": json.loads(args), "count": n} for (path, args), n in counts.items()]


@contextmanager
def record_modules() -> Iterator[Modules]:
    """Record every module constructed in this process until the block ends, of any host."""
    modules = Modules()
    modules.start()
    try:
        yield modules
    finally:
        modules.stop()


def _constructs(frame: FrameType, module: nn.Module) -> bool:
    """Whether this frame is an __init__ of that very module, or a wrapper of one: its first argument says so."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return bool(names) and frame.f_locals.get(names[0]) is module


def _arguments(frame: FrameType) -> dict[str, Any]:
    found = inspect.getargvalues(frame)
    given = {name: found.locals.get(name) for name in found.args[1:]}
    if found.keywords:
        given.update(found.locals.get(found.keywords) or {})
    return {name: "*" if name in LAYER_NUMBERS else plain(value) for name, value in given.items()}


def plain(value: Any) -> Any:
    """Return the value as JSON; an object without a JSON form becomes {'object': its class}."""
    if isinstance(value, str):
        return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", value)  # layers.17.mlp: the same
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    if isinstance(value, type):
        return {"class": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, (list, tuple, torch.Size)) and len(value) <= 64:
        return [plain(v) for v in value]
    if isinstance(value, dict) and len(value) <= 64 and all(isinstance(k, str) for k in value):
        return {k: plain(v) for k, v in value.items()}
    return {"object": f"{type(value).__module__}:{type(value).__qualname__}"}
