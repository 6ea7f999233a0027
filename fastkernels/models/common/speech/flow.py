"""Speech tokens to a mel spectrogram by flow matching: CosyVoice3's diffusion transformer and its ten Euler steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.overrides.activation.vllm import VllmGELUTanh
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.diffusion.ada_layer_norm import ada_layer_norm
from fastkernels.overrides.diffusion.gated_residual import gated_residual
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding
from fastkernels.overrides.rope.rotary_emb import rotary_emb

EPS = 1e-6
TIMES = 256  # channels of the embedding of a time
MOST = 15_000  # frames of the noise that all requests begin with: 300 s


@dataclass(frozen=True)
class FlowConfig:
    """Sizes of CosyVoice3's flow.

    vocab     speech tokens; ratio: frames of one
    mel       channels of a frame; speaker: of a speaker's embedding
    lookahead  tokens behind a token that its frames read; lookahead_width: channels of that convolution
    chunk     frames that see each other when speech is streamed
    steps     of Euler's method; guidance: weight of the difference to a step without a condition
    """

    vocab: int = 6561
    ratio: int = 2
    mel: int = 80
    speaker: int = 192
    lookahead: int = 3
    lookahead_width: int = 1024
    width: int = 1024
    depth: int = 22
    heads: int = 16
    head_size: int = 64
    expansion: int = 2
    kernel: int = 31
    groups: int = 16
    chunk: int = 50
    steps: int = 10
    guidance: float = 0.7


@dataclass(frozen=True)
class Utterance:
    """Tokens to make frames of. Tensors are on the CPU.

    tokens     [N] int64
    prompt     [P] int64, tokens of the voice; frames: [ratio * P, mel] of the same; speaker: its embedding [S]
    final      False if further tokens follow. The last `lookahead` tokens have no frames then
    streaming  frames see those of their chunk and the chunks before, so that later tokens do not change them
    """

    tokens: torch.Tensor
    prompt: torch.Tensor
    frames: torch.Tensor
    speaker: torch.Tensor
    final: bool = True
    streaming: bool = False


class _Lookahead(nn.Module):
    """A convolution of the next tokens, and one of the last ones: [B, T + lookahead, C] to [B, T, C]."""

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(c.mel, c.lookahead_width, c.lookahead + 1)
        self.conv2 = nn.Conv1d(c.lookahead_width, c.mel, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.leaky_relu(self.conv1(tokens.transpose(1, 2)))
        x = self.conv2(F.pad(x, (self.conv2.kernel_size[0] - 1, 0))).transpose(1, 2)
        return x + tokens[:, : x.shape[1]]


class _Positions(nn.Module):
    """Two causal convolutions, which tell a frame what is in front of it: [B, T, H] to the same."""

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.reach = c.kernel - 1
        for name in ("conv1", "conv2"):
            self.add_module(
                name, nn.Sequential(nn.Conv1d(c.width, c.width, c.kernel, groups=c.groups), nn.Mish())
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for layer in self.children():
            x = layer(F.pad(x, (self.reach, 0)))
        return x.transpose(1, 2)


class FlowAttention(nn.Module):
    """x [B, T, H] to the same. The first head alone is rotated, as in the reference."""

    ops = ("rotary_emb", "attention_dense")

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.heads, self.head_size = c.heads, c.head_size
        inner = c.heads * c.head_size
        self.to_q, self.to_k, self.to_v = (nn.Linear(c.width, inner) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(inner, c.width)])

    def forward(self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (
            to(x).unflatten(2, (self.heads, self.head_size)) for to in (self.to_q, self.to_k, self.to_v)
        )
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x))
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        rotary_emb(positions, q[:, :1], k[:, :1], self.head_size, table, False, False)
        q, k = (t.unflatten(0, x.shape[:2]) for t in (q, k))
        return self.to_out[0](attention_dense(q, k, v, self.head_size**-0.5, mask).flatten(2))


class FlowBlock(nn.Module):
    """One layer: x [B, T, H], modulated by time [B, H], to the same."""

    ops = ("ada_layer_norm", "gated_residual")

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.attn_norm: Any = nn.Module()
        self.attn_norm.linear = nn.Linear(c.width, 6 * c.width)
        self.attn = FlowAttention(c)
        inner = c.expansion * c.width
        up = nn.Sequential(nn.Linear(c.width, inner), VllmGELUTanh())
        self.ff: Any = nn.Module()
        self.ff.ff = nn.ModuleList([up, nn.Identity(), nn.Linear(inner, c.width)])

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.attn_norm.linear(time).chunk(6, dim=1)
        found = self.attn(ada_layer_norm(x, scale, shift, None, None, EPS), table, mask)
        x, y = gated_residual(x, found, gate, mlp_scale, mlp_shift, None, None, EPS)
        for layer in self.ff.ff:
            y = layer(y)
        return gated_residual(x, y, mlp_gate)[0]


class Estimator(nn.Module):
    """The diffusion transformer: the direction in which frames move at a time."""

    ops = ("ada_layer_norm", "timestep_embedding")

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.head_size = c.head_size
        self.time_embed: Any = nn.Module()
        self.time_embed.time_mlp = nn.Sequential(
            nn.Linear(TIMES, c.width), nn.SiLU(), nn.Linear(c.width, c.width)
        )
        self.input_embed: Any = nn.Module()
        self.input_embed.proj = nn.Linear(4 * c.mel, c.width)
        self.input_embed.conv_pos_embed = _Positions(c)
        self.transformer_blocks = nn.ModuleList(FlowBlock(c) for _ in range(c.depth))
        self.norm_out: Any = nn.Module()
        self.norm_out.linear = nn.Linear(c.width, 2 * c.width)
        self.proj_out = nn.Linear(c.width, c.mel)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor, time: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """x: frames [B, T, mel]; condition: [B, T, 3 * mel], see SpeechFlow; time: [B]. mask: see attention_dense."""
        embedded = timestep_embedding(time, TIMES, False, 1.0, 1000.0)
        modulation = F.silu(self.time_embed.time_mlp(embedded.to(x.dtype)))
        hidden = self.input_embed.proj(torch.cat([x, condition], dim=-1))
        hidden = self.input_embed.conv_pos_embed(hidden) + hidden
        table = rotations(x.shape[1], self.head_size, x.device)
        for block in self.transformer_blocks:
            hidden = block(hidden, modulation, table, mask)
        scale, shift = self.norm_out.linear(modulation).chunk(2, dim=1)
        return self.proj_out(ada_layer_norm(hidden, scale, shift, None, None, EPS))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host, without waiting for a GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def rotations(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of the positions: [length, size] float32."""
    rates = 1.0 / 1e4 ** (torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.arange(length, device=device).float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SpeechFlow(nn.Module):
    """Speech tokens to frames of a mel spectrogram. Parameters have the names of CosyVoice3's flow.pt."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = c = config
        self.input_embedding = nn.Embedding(c.vocab, c.mel)
        self.spk_embed_affine_layer = nn.Linear(c.speaker, c.mel)
        self.pre_lookahead_layer = _Lookahead(c)
        self.decoder: Any = nn.Module()
        self.decoder.estimator = Estimator(c)
        self._noise: torch.Tensor | None = None

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Utterance], run: Callable[..., torch.Tensor] | None = None, multiple: int = 1
    ) -> list[torch.Tensor]:
        """Frames [T, mel] of each row's tokens, behind those of its prompt, in one batch.

        run: calls `solve` with its arguments, by default directly; multiple: of the frames of the batch, with padding
        """
        lengths = [self.length(row) for row in rows]
        if max(lengths) > MOST:
            raise ValueError(
                f"speech of {max(lengths)} frames is not possible, only {MOST} with those of the voice"
            )
        found = (run or self.solve)(*self._inputs(rows, lengths, -(-max(lengths) // multiple) * multiple))
        return [
            x[len(row.frames) : length].float() for x, row, length in zip(found, rows, lengths, strict=True)
        ]

    def length(self, row: Utterance) -> int:
        """Frames of a row, those of its prompt included."""
        tokens = len(row.prompt) + len(row.tokens)
        return (tokens if row.final else tokens - self.config.lookahead) * self.config.ratio

    def _inputs(
        self, rows: Sequence[Utterance], lengths: Sequence[int], longest: int
    ) -> tuple[torch.Tensor, ...]:
        """The arguments of `solve`, without a mask if every frame sees all others."""
        c, device = self.config, self.input_embedding.weight.device
        tokens = torch.zeros(len(rows), -(-longest // c.ratio) + c.lookahead, dtype=torch.int64)
        given = torch.zeros(len(rows), longest, c.mel)
        known = torch.zeros(tokens.shape)
        for i, row in enumerate(rows):
            own = torch.cat([row.prompt, row.tokens]).clamp(min=0)
            tokens[i, : len(own)], known[i, : len(own)] = own, 1
            given[i, : len(row.frames)] = row.frames
        voices = torch.stack([row.speaker for row in rows])
        dtype = self.input_embedding.weight.dtype
        tokens, known, given, voices = (to_device(t, device) for t in (tokens, known, given, voices))
        embedded = self.input_embedding(tokens) * known[..., None].to(dtype)
        mu = self.pre_lookahead_layer(embedded).repeat_interleave(c.ratio, dim=1)[:, :longest]
        voice = self.spk_embed_affine_layer(F.normalize(voices.to(dtype), dim=1))
        condition = torch.cat([given.to(dtype), mu, voice[:, None].expand(-1, longest, -1)], dim=-1)
        x = self.noise(device)[:longest].expand(len(rows), -1, -1)
        streaming = [row.streaming for row in rows]
        if not any(streaming) and min(lengths) == longest:
            return x, condition
        at = torch.arange(longest, device=device)
        mask = (at < to_device(torch.tensor(lengths), device)[:, None])[:, None, None]
        if any(streaming):
            chunk = at // c.chunk
            mask = mask & (
                (chunk[:, None] >= chunk) | ~to_device(torch.tensor(streaming), device)[:, None, None, None]
            )
        return x, condition, mask

    def solve(
        self, x: torch.Tensor, condition: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Euler's method from noise x [B, T, mel] float32 to frames, with a condition [B, T, 3 * mel] and without.

        mask: see attention_dense
        """
        c, dtype = self.config, condition.dtype
        both = torch.cat([condition, torch.zeros_like(condition)])
        twice = None if mask is None else torch.cat([mask, mask])
        times = [1 - math.cos(0.5 * math.pi * i / c.steps) for i in range(c.steps + 1)]
        for now, after in pairwise(times):
            time = torch.full((len(both),), now, device=x.device, dtype=torch.float32)
            moved = self.decoder.estimator(x.to(dtype).repeat(2, 1, 1), both, time, twice)
            found, free = moved.float().chunk(2)
            x = x + (after - now) * ((1 + c.guidance) * found - c.guidance * free)
        return x

    def noise(self, device: torch.device) -> torch.Tensor:
        """The noise [MOST, mel] that all speech begins with: that of CosyVoice3, a function of seed 0."""
        if self._noise is None or self._noise.device != device:
            generator = torch.Generator().manual_seed(0)
            self._noise = torch.randn(self.config.mel, MOST, generator=generator).T.contiguous().to(device)
        return self._noise
