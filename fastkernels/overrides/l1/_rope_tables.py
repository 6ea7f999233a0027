"""The tables that rotary_emb reads: frequencies, Llama 3's scaling of them, cosines and sines."""

from __future__ import annotations

import math

import torch


def inverse_frequencies(base: float, rotary_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32 on the CPU: base ** (-2j / rotary_dim)."""
    return 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float, device="cpu") / rotary_dim))


def llama3_frequencies(
    inv_freq: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original_max: int
) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / inv_freq
    if low_freq_factor == high_freq_factor:
        keep = torch.zeros_like(inv_freq)
    else:
        keep = (original_max / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - keep) * inv_freq / factor + keep * inv_freq
    scaled = torch.where(wavelength > original_max / low_freq_factor, inv_freq / factor, between)
    return torch.where(wavelength < original_max / high_freq_factor, inv_freq, scaled)


def cos_sin_table(inv_freq: torch.Tensor, max_positions: int, start: int = 0) -> torch.Tensor:
    """[max_positions, rotary_dim] float32: the cosines, then the sines, of position * frequency."""
    t = torch.arange(start, start + max_positions, dtype=torch.float, device=inv_freq.device)
    angles = torch.outer(t, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
