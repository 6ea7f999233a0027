"""Tables of rotary embeddings for contexts longer than those of the training: what both hosts' classes share.

Linear: positions are divided. NTK: the base grows. YaRN (Peng et al., arXiv 2309.00071): long wavelengths are divided,
short ones kept, and cosines and sines grow. LongRoPE (Ding et al., arXiv 2402.13753): each wavelength has factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.rope.rope_tables import RopeModule, Span, inverse_frequencies, shared_table


def dynamic_base(base: float, ratio: float, rotary_dim: int) -> float:
    """The base with which the longest wavelength is `ratio` times as long, the shortest unchanged."""
    return float(base * ratio ** (rotary_dim / (rotary_dim - 2)))


def ntk_frequencies(
    base: float, rotary_dim: int, factor: float, mixed_b: float | None = None
) -> torch.Tensor:
    """[rotary_dim / 2] float32: a base `factor` times as large, or with mixed_b (https://kexue.fm/archives/9706)."""
    if mixed_b is None:
        return inverse_frequencies(base * factor, rotary_dim) / factor ** (2 / rotary_dim)
    half = rotary_dim // 2
    exponent = torch.tensor(factor).log() / half**mixed_b
    return (
        inverse_frequencies(base, rotary_dim)
        / (exponent * torch.arange(1, half + 1).float() ** mixed_b).exp()
    )


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The factor of cosines and sines, 1 without scaling."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_frequencies(
    base: float,
    rotary_dim: int,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max: int,
    truncate: bool = True,
    extrapolation_factor: float = 1.0,
) -> torch.Tensor:
    """[rotary_dim / 2] float32: pairs with more than beta_fast turns within original_max positions are kept, those
    with fewer than beta_slow divided by `factor`, those in between interpolated.
    """

    def pair_with(turns: float) -> float:
        return rotary_dim * math.log(original_max / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float, device="cpu") - low) / (high - low)
    keep = (1 - ramp.clamp(0, 1)) * extrapolation_factor
    wavelengths = base ** (
        torch.arange(0, rotary_dim, 2, dtype=torch.float, device="cpu") / rotary_dim
    )  # over 2 pi
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


class YaRN(RopeModule):
    """YaRN's table. The subclass sets the attributes before it calls the constructor of a host's plain class."""

    scaling_factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    truncate = True
    extrapolation_factor = 1.0
    least_rows = 0  # of the table, whose length follows from the factor otherwise

    def _inv_freq(self) -> torch.Tensor:
        how = (self.scaling_factor, self.beta_fast, self.beta_slow, self.max_position_embeddings)
        return yarn_frequencies(self.base, self.rotary_dim, *how, self.truncate, self.extrapolation_factor)

    def _spans(self) -> list[Span]:
        rows = max(math.ceil(self.max_position_embeddings * self.scaling_factor), self.least_rows)
        return [Span(self._inv_freq(), rows, magnitude=self.mscale)]


class LinearScaling(RopeModule):
    """Positions divided by a factor; several factors have their tables one after the other."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factors: Sequence[float] | float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        single = isinstance(scaling_factors, (int, float))
        self.scaling_factors: Any = [scaling_factors] if single else scaling_factors
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)  # type: ignore[call-arg]

    def _spans(self) -> list[Span]:
        longest = self.max_position_embeddings
        return [Span(self._inv_freq(), math.ceil(longest * f), divisor=f) for f in self.scaling_factors]


class DynamicNTKAlpha(RopeModule):
    """A base that grows with alpha."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_alpha: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.scaling_alpha = scaling_alpha
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)  # type: ignore[call-arg]

    def _inv_freq(self) -> torch.Tensor:
        base = dynamic_base(self.base, self.scaling_alpha, self.rotary_dim)
        return inverse_frequencies(base, self.rotary_dim)


class Gemma4(RopeModule):
    """Gemma 4: the first pairs of each half of the head rotate, with the whole head's exponents."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.rope_angles = rotary_dim // 2
        self.nope_angles = head_size // 2 - self.rope_angles
        super().__init__(head_size, head_size, max_position_embeddings, base, is_neox_style, dtype)  # type: ignore[call-arg]

    def _inv_freq(self) -> torch.Tensor:
        rotating = inverse_frequencies(self.base, self.head_size)[: self.rope_angles]
        return torch.nn.functional.pad(rotating, (0, self.nope_angles))


class LongRoPE(RopeModule):
    """Phi-3's two tables, one after the other: for the original context, and for longer ones."""

    long_short_cos_sin_cache: torch.Tensor

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, original_max_position_embeddings: int,
        base: float, is_neox_style: bool, dtype: torch.dtype, short_factor: list[float], long_factor: list[float],
        short_mscale: float | None = None, long_mscale: float | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        if not is_neox_style:
            name = type(self).__name__
            raise ValueError(f"{name}: is_neox_style=False is not supported, it rotates halves")
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self.original_max_position_embeddings = original_max_position_embeddings
        self.short_factor, self.long_factor = short_factor, long_factor
        longer, grows = max_position_embeddings / original_max_position_embeddings, 1.0
        if longer > 1:
            grows = math.sqrt(1 + math.log(longer) / math.log(original_max_position_embeddings))
        self.short_mscale = grows if short_mscale is None else short_mscale
        self.long_mscale = grows if long_mscale is None else long_mscale
        spans = (
            Span(self._slowed(short_factor), original_max_position_embeddings, magnitude=self.short_mscale),
            Span(self._slowed(long_factor), max_position_embeddings, magnitude=self.long_mscale),
        )
        table = shared_table(spans, dtype, torch.get_default_device())
        self.register_buffer("long_short_cos_sin_cache", table, persistent=False)

    def _slowed(self, factors: list[float]) -> torch.Tensor:
        return self._inv_freq() / torch.tensor(factors, dtype=torch.float32, device="cpu")


def choose_axes(rows: torch.Tensor, section: Sequence[int], interleaved: bool) -> torch.Tensor:
    """[tokens, rotary_dim] from the table's rows at temporal, height and width positions, [3, tokens, rotary_dim].

    section: pairs of each axis. They follow one another, or `interleaved` take turns while height and width have any.
    """
    half = rows.shape[-1] // 2
    axes = rows.unflatten(-1, (2, half))  # [3, tokens, 2, pairs]
    if interleaved:
        pair = torch.arange(half, device=rows.device)
        chosen = axes[0]
        for axis in (1, 2):
            chosen = torch.where((pair % 3 == axis) & (pair < 3 * section[axis]), axes[axis], chosen)
    else:
        parts = axes.split(list(section), dim=-1)
        chosen = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    return chosen.flatten(-2)


def axes_chosen(
    positions: torch.Tensor, table: torch.Tensor, section: Sequence[int] | None, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [tokens] and their table: [tokens] as they are, or the rows chosen for positions [3, tokens]."""
    if positions.ndim == 1:
        return positions, table
    if section is None:
        raise ValueError(f"positions {tuple(positions.shape)} need an mrope_section")
    rows = choose_axes(table[positions], section, interleaved)
    return torch.arange(rows.shape[0], device=rows.device), rows
