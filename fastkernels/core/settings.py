"""Settings of torch that all code of a process shares. A kernel that changes one changes the results or the speed of
other code: one that a candidate's import changes is restored, and a call that leaves one changed is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

_GROUPS = "fp32_precision", "cudnn.fp32_precision", "mkldnn.fp32_precision"  # defaults of those below
_BACKENDS = (
    "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision", "cudnn.benchmark",
    "cudnn.deterministic",
)  # fmt: skip
_MIXED = "mixed"
_Setting = tuple[Callable[[], Any], Callable[..., Any]]


def _attribute(path: str) -> _Setting:
    """An attribute of a part of torch.backends."""
    place, _, name = path.rpartition(".")
    owner: Any = attrgetter(place)(torch.backends) if place else torch.backends
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _is_known(path: str) -> bool:
    """Whether this version of torch has an attribute of torch.backends."""
    try:
        attrgetter(path)(torch.backends)
    except AttributeError:
        return False
    return True


def _attributes(paths: Iterable[str]) -> dict[str, _Setting]:
    return {f"torch.backends.{path}": _attribute(path) for path in paths if _is_known(path)}


def _matmul_precision() -> str:
    """_MIXED where torch raises: a backend's own precision differs, as in a process that sets it by the newer names."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return _MIXED


def _set_matmul_precision(value: str) -> None:
    """Where it was mixed, the backends' own precisions, which are set behind it, make it so again."""
    torch.set_float32_matmul_precision("highest" if value == _MIXED else value)


class _Seed(int):
    """A seed, with the state that its generator has."""

    state: torch.Tensor


def _seed() -> _Seed:
    seed = _Seed(torch.initial_seed())
    seed.state = torch.get_rng_state()
    return seed


def _set_seed(seed: _Seed) -> None:
    torch.manual_seed(seed)  # of GPUs, too
    torch.set_rng_state(seed.state)


def _autocast(device: str) -> _Setting:
    return (
        lambda: torch.is_autocast_enabled(device),
        lambda value: torch.set_autocast_enabled(device, value),
    )


def _flushes_denormals() -> bool:
    tiny = sys.float_info.min
    return tiny / 2 == 0.0


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # a device is a mode, and costs time


SETTINGS: dict[str, _Setting] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_default_device()": (torch.get_default_device, _set_default_device),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.initial_seed()": (_seed, _set_seed),
    "the flag of torch.set_flush_denormal": (_flushes_denormals, torch.set_flush_denormal),
    "torch.is_autocast_enabled('cpu')": _autocast("cpu"),
    "torch.is_autocast_enabled('cuda')": _autocast("cuda"),
    "torch.get_deterministic_debug_mode()": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    # Each sets some of those behind it.
    **_attributes(_GROUPS),
    "torch.get_float32_matmul_precision()": (_matmul_precision, _set_matmul_precision),
    **_attributes(_BACKENDS),
}


def now() -> dict[str, Any]:
    """{setting: its value in this thread}."""
    return {name: get() for name, (get, _) in SETTINGS.items()}


def changed(before: dict[str, Any]) -> str:
    """'SETTING from VALUE to VALUE' of all that differ from `before`; '' if none does."""
    return ", ".join(
        f"{name} from {before[name]} to {value}" for name, value in now().items() if value != before[name]
    )


def restore(before: dict[str, Any]) -> None:
    """Give each setting the value in `before`."""
    for name, (get, change) in SETTINGS.items():
        if get() != before[name]:  # read now: another one may have set it
            change(before[name])
