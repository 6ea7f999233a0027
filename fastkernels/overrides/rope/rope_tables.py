"""Frequencies of rotary embeddings, tables of cosines and sines, and the base classes of modules that hold a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn


def inverse_frequencies(base: float, rotary_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32 on the CPU: base ** (-2j / rotary_dim)."""
    return 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float, device="cpu") / rotary_dim))


def llama3_frequencies(
    inv_freq: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max: int
) -> torch.Tensor:
    """Scale frequencies as Llama 3.1 does: those of long wavelengths are divided by `factor`, short ones kept.

    Wavelengths in between are interpolated.
    """
    wavelength = 2 * math.pi / inv_freq
    if low_freq_factor == high_freq_factor:
        keep = torch.zeros_like(inv_freq)
    else:
        keep = (original_max / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - keep) * inv_freq / factor + keep * inv_freq
    scaled = torch.where(wavelength > original_max / low_freq_factor, inv_freq / factor, between)
    return torch.where(wavelength < original_max / high_freq_factor, inv_freq, scaled)


def cos_sin_table(
    inv_freq: torch.Tensor, max_positions: int, start: int = 0, divisor: float = 1.0, magnitude: float = 1.0
) -> torch.Tensor:
    """[max_positions, rotary_dim] float32: the cosines, then the sines, of position / divisor * frequency, scaled."""
    t = torch.arange(start, start + max_positions, dtype=torch.float, device=inv_freq.device) / divisor
    angles = torch.outer(t, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


class Span(NamedTuple):
    """Arguments of cos_sin_table for consecutive rows of a module's table."""

    inv_freq: torch.Tensor
    rows: int
    start: int = 0
    divisor: float = 1.0
    magnitude: float = 1.0


_TABLES: WeakValueDictionary[tuple, torch.Tensor] = WeakValueDictionary()


def shared_table(spans: Sequence[Span], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the spans' rows in this dtype on this device; equal arguments share one tensor, which must not be written.

    The cache holds weak references. A table of 131072 positions and 128 channels takes 32 MiB in bfloat16, which would
    be 1 GiB for 32 layers.
    """
    parts = tuple((tuple(span.inv_freq.tolist()), *span[1:]) for span in spans)
    key = (parts, dtype, device, torch.is_inference_mode_enabled())
    table = _TABLES.get(key)
    if table is None and device.type == "meta":
        rows, width = sum(span.rows for span in spans), 2 * len(spans[0].inv_freq)
        table = _TABLES[key] = torch.empty(rows, width, dtype=dtype, device=device)
    elif table is None:
        every = torch.cat([cos_sin_table(*span) for span in spans])
        table = _TABLES[key] = every.to(device, dtype)
    return table


def rotate(
    op: Callable[..., Any], positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *how: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run op(positions, query, key, *how) and return query and key, changed in place.

    In a compiled graph the op's functional variant returns new tensors, if it has one.
    """
    functional = getattr(op, "functional", None)
    if functional is not None and key is not None and torch.compiler.is_compiling():
        return functional(positions, query, key, *how)
    op(positions, query, key, *how)
    return query, key


class RopeModule(nn.Module):
    """Base of the standalone classes of both hosts: the host's attributes and its cos_sin_cache."""

    cos_sin_cache: torch.Tensor

    def _setup(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype

    def _inv_freq(self) -> torch.Tensor:
        return inverse_frequencies(self.base, self.rotary_dim)

    def _spans(self) -> list[Span]:
        return [Span(self._inv_freq(), self.max_position_embeddings)]

    def _make_cache(self, dtype: torch.dtype) -> None:
        table = shared_table(self._spans(), dtype, torch.get_default_device())
        self.register_buffer("cos_sin_cache", table, persistent=False)


class Llama3(RopeModule):
    """Llama 3.1's scaled frequencies, with the constructor of both hosts' classes."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, scaling_factor: float, low_freq_factor: float, high_freq_factor: float,
        orig_max_position: int,
    ) -> None:  # fmt: skip
        self.llama3 = (scaling_factor, low_freq_factor, high_freq_factor, orig_max_position)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)  # type: ignore[call-arg]

    def _inv_freq(self) -> torch.Tensor:
        return llama3_frequencies(super()._inv_freq(), *self.llama3)
