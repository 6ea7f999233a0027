"""A mel spectrogram to sound: CosyVoice3's vocoder, a causal HiFTNet (arXiv 2309.09493)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SLOPE = 0.1  # of leaky ReLUs
LIMIT = 0.99  # of samples
LOUDEST = 100.0  # magnitude
SINE, NOISE, VOICED = 0.1, 0.003, 10.0  # amplitudes of the source, and the pitch in Hz from which it has one


@dataclass(frozen=True)
class VocoderConfig:
    """Sizes of CosyVoice3's vocoder.

    rates, kernels    of the layers that repeat frames; hop, bins: of the spectrum that the last one makes
    dilations         of the residual blocks, of which there is one for each of block_kernels
    source_kernels    of the residual blocks of the source
    ahead             frames that the first convolution reads; pitch_ahead: those that the pitch needs
    """

    mel: int = 80
    width: int = 512
    pitch_width: int = 512
    harmonics: int = 8
    rate: int = 24_000
    rates: tuple[int, ...] = (8, 5, 3)
    kernels: tuple[int, ...] = (16, 11, 7)
    hop: int = 4
    size: int = 16
    block_kernels: tuple[int, ...] = (3, 7, 11)
    source_kernels: tuple[int, ...] = (7, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    ahead: int = 4
    pitch_ahead: int = 3

    @property
    def samples(self) -> int:
        """Samples of a frame."""
        return math.prod(self.rates) * self.hop


class _Snake(nn.Module):
    """x + sin(alpha * x)^2 / alpha, with an alpha for each channel: [B, C, T]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alpha = self.alpha[:, None]
        return x + (1.0 / (alpha + 1e-9)) * torch.sin(x * alpha) ** 2


def _causal(layer: nn.Conv1d, x: torch.Tensor) -> torch.Tensor:
    """The convolution of x [B, C, T] with zeros in front."""
    reach = layer.kernel_size[0] - layer.stride[0] if layer.stride[0] == 1 else layer.stride[0] - 1
    return layer(F.pad(x, (reach * layer.dilation[0], 0)))


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, dilation=d) for d in dilations)
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel) for _ in dilations)
        self.activations1 = nn.ModuleList(_Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(_Snake(channels) for _ in dilations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        for first, wide, second, narrow in layers:
            assert isinstance(wide, nn.Conv1d) and isinstance(narrow, nn.Conv1d)
            x = x + _causal(narrow, second(_causal(wide, first(x))))
        return x


class _Pitch(nn.Module):
    """Frames [B, mel, T + 3] to their pitch in Hz, [B, T]. Computed in float64: later chunks must find the same."""

    def __init__(self, c: VocoderConfig) -> None:
        super().__init__()
        sizes = [(c.mel, c.pitch_ahead + 1), *[(c.pitch_width, 3)] * 4]
        layers = [(nn.Conv1d(channels, c.pitch_width, kernel), nn.ELU()) for channels, kernel in sizes]
        self.condnet = nn.ModuleList(module for pair in layers for module in pair)
        self.classifier = nn.Linear(c.pitch_width, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = frames.double()
        for i, layer in enumerate(self.condnet):
            if not isinstance(layer, nn.Conv1d):
                x = layer(x)
                continue
            x = x if i == 0 else F.pad(x, (layer.kernel_size[0] - 1, 0))
            bias = None if layer.bias is None else layer.bias.double()
            x = F.conv1d(x, layer.weight.double(), bias)
        last = self.classifier
        return F.linear(x.transpose(1, 2), last.weight.double(), last.bias.double())[..., 0].abs()


class Vocoder(nn.Module):
    """config: sizes. Parameters have the names of CosyVoice3's hift.pt, without its weight norms."""

    def __init__(self, config: VocoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = c = config
        channels = [c.width >> i for i in range(len(c.rates) + 1)]
        self.conv_pre = nn.Conv1d(c.mel, c.width, c.ahead + 1)
        self.ups = nn.ModuleList(
            nn.Conv1d(channels[i], channels[i + 1], kernel) for i, kernel in enumerate(c.kernels)
        )
        self.source_downs = nn.ModuleList()
        for i, width in enumerate(channels[1:]):
            down = math.prod(c.rates[i + 1 :])
            kernel = 1 if down == 1 else 2 * down
            self.source_downs.append(nn.Conv1d(c.size + 2, width, kernel, down))
        self.source_resblocks = nn.ModuleList(
            _ResidualBlock(width, kernel, c.dilations)
            for width, kernel in zip(channels[1:], c.source_kernels, strict=True)
        )
        self.resblocks = nn.ModuleList(
            _ResidualBlock(width, kernel, c.dilations) for width in channels[1:] for kernel in c.block_kernels
        )
        self.conv_post = nn.Conv1d(channels[-1], c.size + 2, 7)
        self.m_source: Any = nn.Module()
        self.m_source.l_linear = nn.Linear(c.harmonics + 1, 1)
        self.f0_predictor = _Pitch(c)
        self._seed = seed
        self._noise = torch.empty(0)

    @torch.inference_mode()
    def forward(
        self,
        frames: Sequence[torch.Tensor],
        final: Sequence[bool],
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        multiple: int = 1,
    ) -> list[torch.Tensor]:
        """Samples [n] of each row's frames [T, mel], in one batch.

        final: False if further frames of the row follow. Its last eight have no samples then, and later calls with more
        frames give the same samples for those in front of them
        run: calls `stack`, by default directly; multiple: of the frames of the batch, with padding
        """
        c = self.config
        longest = -(-max(len(row) for row in frames) // multiple) * multiple
        x = frames[0].new_zeros(len(frames), longest + c.ahead, c.mel)
        for i, row in enumerate(frames):
            x[i, : len(row)] = row
        x = x.transpose(1, 2)
        pitch = self.f0_predictor(x[:, :, : longest + c.pitch_ahead]).to(x.dtype)
        source = self.source(pitch)
        spectra = x.new_zeros(len(frames), c.size + 2, longest * self.steps + 1)
        counts = []
        for i, (row, last) in enumerate(zip(frames, final, strict=True)):
            known = len(row) if last else len(row) - c.pitch_ahead  # frames with a pitch
            counts.append(known if last else known - c.ahead)
            if counts[-1] > 0:
                spectrum = self._spectrum(source[i : i + 1, : known * c.samples])
                size = counts[-1] * self.steps + 1
                spectra[i, :, :size] = spectrum[0, :, :size]
        made = (run or self.stack)(x, spectra)
        found = []
        for row, count, last in zip(made, counts, final, strict=True):
            sound = self._inverse(row[:, : count * self.steps + 1]) if count > 0 else row.new_empty(0)
            sound = sound if last else sound[: max(len(sound) - c.samples, 0)]
            found.append(sound.clamp(-LIMIT, LIMIT))
        return found

    def stack(self, x: torch.Tensor, spectra: torch.Tensor) -> torch.Tensor:
        """The convolutions: frames [B, mel, T + ahead], spectra of the source [B, size + 2, T * steps + 1] to the same.

        Every value depends on those in front of it alone, but for the frames ahead: rows may be padded at their end.
        """
        c = self.config
        x = self.conv_pre(x)
        blocks = len(c.block_kernels)
        for i, up in enumerate(self.ups):
            assert isinstance(up, nn.Conv1d)
            x = _causal(up, F.leaky_relu(x, SLOPE).repeat_interleave(c.rates[i], dim=2))
            if i == len(c.rates) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            down = self.source_downs[i]
            assert isinstance(down, nn.Conv1d)
            x = x + self.source_resblocks[i](_causal(down, spectra))
            x = sum(self.resblocks[i * blocks + j](x) for j in range(blocks)) / blocks
        return _causal(self.conv_post, F.leaky_relu(x))

    @property
    def steps(self) -> int:
        """Columns of the spectrum that a frame has."""
        return math.prod(self.config.rates)

    def _inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Samples of logarithms of magnitudes and sines of phases [size + 2, n]."""
        c = self.config
        magnitude, phase = x[: c.size // 2 + 1].exp().clamp(max=LOUDEST), x[c.size // 2 + 1 :].sin()
        window = torch.hann_window(c.size, dtype=x.dtype, device=x.device)[:, None]
        columns = torch.fft.irfft(torch.polar(magnitude, phase), c.size, dim=0) * window
        count = columns.shape[1]
        length = (count - 1) * c.hop + c.size

        def overlapped(columns: torch.Tensor) -> torch.Tensor:
            return F.fold(columns[None], (1, length), (1, c.size), stride=(1, c.hop))[0, 0, 0]

        # torch.istft does the same, and waits for the device
        made = overlapped(columns) / overlapped((window * window).expand(-1, count))
        return made[c.size // 2 : length - c.size // 2]

    def source(self, pitch: torch.Tensor) -> torch.Tensor:
        """The excitation [B, n] of a pitch [B, T]: harmonics, and noise from a fixed sequence."""
        c = self.config
        harmonics = pitch[..., None] * torch.arange(
            1, c.harmonics + 2, device=pitch.device, dtype=pitch.dtype
        )
        phase = torch.cumsum((harmonics / c.rate) % 1, dim=1) * 2 * math.pi * c.samples
        sines = (phase.sin() * SINE).repeat_interleave(c.samples, dim=1)  # [B, n, harmonics]
        voiced = (pitch > VOICED).to(pitch.dtype).repeat_interleave(c.samples, dim=1)[..., None]
        noise = (voiced * NOISE + (1 - voiced) * SINE / 3) * self.noise(sines.shape[1], sines.device).to(
            sines.dtype
        )
        return torch.tanh(self.m_source.l_linear(sines * voiced + noise))[..., 0]

    def noise(self, samples: int, device: torch.device) -> torch.Tensor:
        """[samples, harmonics] uniform in [0, 1), the beginning of one sequence however long it is."""
        if len(self._noise) < samples or self._noise.device != device:
            count = 1 << max(samples - 1, 1).bit_length()
            generator = torch.Generator().manual_seed(self._seed)
            self._noise = torch.rand(count, self.config.harmonics + 1, generator=generator).to(device)
        return self._noise[:samples]

    def _spectrum(self, samples: torch.Tensor) -> torch.Tensor:
        """Real, then imaginary parts [B, size + 2, frames] of samples [B, n]."""
        c = self.config
        window = torch.hann_window(c.size, dtype=samples.dtype, device=samples.device)
        found = torch.stft(samples, c.size, c.hop, c.size, window=window, return_complex=True)
        return torch.cat([found.real, found.imag], dim=1)
