"""Settings of torch that all code of a process shares. A kernel that changes one changes the results or the speed of
other code: one that a candidate's import changes is restored, and a call that leaves one changed is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

_BACKENDS = (  # those that change others come first
    "cudnn.allow_tf32", "fp32_precision", "cudnn.fp32_precision", "mkldnn.fp32_precision",
    "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "cudnn.benchmark", "cudnn.deterministic",
)  # fmt: skip
UNREADABLE = "unreadable"
_Setting = tuple[Callable[[], Any], Callable[..., Any]]


def _attribute(path: str) -> _Setting:
    """An attribute of a part of torch.backends."""
    place, _, name = f"backends.{path}".rpartition(".")
    owner: Any = attrgetter(place)(torch)
    return _readable(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _readable(get: Callable[[], Any], change: Callable[[Any], Any]) -> _Setting:
    """A setting of which torch raises while others contradict it: its value then is UNREADABLE.

    Precisions have older and newer functions, and the older ones do not read what only the newer ones can set.
    """

    def value() -> Any:
        try:
            return get()
        except RuntimeError:
            return UNREADABLE

    return value, lambda value: None if value == UNREADABLE else change(value)


def _is_known(path: str) -> bool:
    """Whether this version of torch has an attribute of torch.backends."""
    try:
        attrgetter(path)(torch.backends)
    except AttributeError:
        return False
    except RuntimeError:  # unreadable now
        return True
    return True


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


class _Seed(int):
    """A seed with the state of the CPU's generator, so that its numbers go on and do not begin again."""

    state: torch.Tensor


def _seed() -> _Seed:
    seed = _Seed(torch.initial_seed())
    seed.state = torch.get_rng_state()
    return seed


def _set_seed(seed: _Seed) -> None:
    torch.manual_seed(seed)
    torch.set_rng_state(seed.state)


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
    "torch.get_float32_matmul_precision()": _readable(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    **{f"torch.backends.{path}": _attribute(path) for path in _BACKENDS if _is_known(path)},
}  # fmt: skip


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
        if get() != before[name]:  # read now: the settings above change it, too
            change(before[name])
