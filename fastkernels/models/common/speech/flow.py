"""Speech tokens to a mel spectrogram by flow matching: CosyVoice3's diffusion transformer and its ten Euler steps."""

from __future__ import annotations

import math
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


class _Attention(nn.Module):
    """x [B, T, H] to the same. The first head alone is rotated, as in the reference."""

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.heads, self.head_size = c.heads, c.head_size
        inner = c.heads * c.head_size
        self.to_q, self.to_k, self.to_v = (nn.Linear(c.width, inner) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(inner, c.width)])

    def forward(self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            to(x).unflatten(2, (self.heads, self.head_size)) for to in (self.to_q, self.to_k, self.to_v)
        )
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x))
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        rotary_emb(positions, q[:, :1], k[:, :1], self.head_size, table, False, False)
        q, k = (t.unflatten(0, x.shape[:2]) for t in (q, k))
        return self.to_out[0](attention_dense(q, k, v, self.head_size**-0.5, mask).flatten(2))


class _Block(nn.Module):
    """One layer: x [B, T, H] and its modulated norm to those of the next layer."""

    def __init__(self, c: FlowConfig) -> None:
        super().__init__()
        self.attn_norm: Any = nn.Module()
        self.attn_norm.linear = nn.Linear(c.width, 6 * c.width)
        self.attn = _Attention(c)
        inner = c.expansion * c.width
        up = nn.Sequential(nn.Linear(c.width, inner), VllmGELUTanh())
        self.ff: Any = nn.Module()
        self.ff.ff = nn.ModuleList([up, nn.Identity(), nn.Linear(inner, c.width)])

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.attn_norm.linear(time).chunk(6, dim=1)
        found = self.attn(ada_layer_norm(x, scale, shift, None, None, EPS), table, mask)
        x, y = gated_residual(x, found, gate, mlp_scale, mlp_shift, None, None, EPS)
        for layer in self.ff.ff:
            y = layer(y)
        return gated_residual(x, y, mlp_gate)[0]


class Estimator(nn.Module):
    """The diffusion transformer: the direction in which frames move at a time."""

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
        self.transformer_blocks = nn.ModuleList(_Block(c) for _ in range(c.depth))
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
        self,
        tokens: torch.Tensor,
        prompt: torch.Tensor,
        frames: torch.Tensor,
        speaker: torch.Tensor,
        final: bool = True,
        streaming: bool = False,
    ) -> torch.Tensor:
        """Frames [T, mel] of tokens [N], behind those of a prompt that gives the voice.

        prompt: tokens [P] of the voice; frames: [ratio * P, mel] of the same; speaker: its embedding [S]
        final: False if further tokens follow. The last `lookahead` tokens have no frames then
        streaming: frames see those of their chunk and the chunks before, so that later tokens do not change them
        """
        c = self.config
        embedded = self.input_embedding(torch.cat([prompt, tokens]).clamp(min=0))[None]
        if final:
            embedded = F.pad(embedded, (0, 0, 0, c.lookahead))
        mu = self.pre_lookahead_layer(embedded).repeat_interleave(c.ratio, dim=1)  # [1, T, mel]
        length, known = mu.shape[1], len(frames)
        if length > MOST:
            raise ValueError(
                f"speech of {length} frames is not possible, only {MOST} with those of the voice"
            )
        voice = self.spk_embed_affine_layer(F.normalize(speaker.to(mu.dtype), dim=0))
        given = F.pad(frames.to(mu.dtype), (0, 0, 0, length - known))
        condition = torch.cat([given[None], mu, voice.expand(1, length, -1)], dim=-1)
        both = torch.cat([condition, torch.zeros_like(condition)])
        mask = None
        if streaming:
            chunk = torch.arange(length, device=mu.device) // c.chunk
            mask = (chunk[:, None] >= chunk)[None, None]
        x = self.noise(mu.device)[:length].to(mu.dtype)[None]
        times = [1 - math.cos(0.5 * math.pi * i / c.steps) for i in range(c.steps + 1)]
        for now, after in pairwise(times):
            time = torch.full((2,), now, dtype=mu.dtype, device=mu.device)
            found, free = self.decoder.estimator(x.expand(2, -1, -1), both, time, mask)
            x = x + (after - now) * ((1 + c.guidance) * found - c.guidance * free)
        return x[0, known:].float()

    def noise(self, device: torch.device) -> torch.Tensor:
        """The noise [MOST, mel] that all speech begins with: that of CosyVoice3, a function of seed 0."""
        if self._noise is None or self._noise.device != device:
            generator = torch.Generator().manual_seed(0)
            self._noise = torch.randn(self.config.mel, MOST, generator=generator).T.contiguous().to(device)
        return self._noise
