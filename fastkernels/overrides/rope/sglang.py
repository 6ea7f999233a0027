"""SGLang's classes of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.kit.dispatcher import on_backend
from fastkernels.overrides.rope.rope_scaling import (
    DynamicNTKAlpha,
    Gemma4,
    LinearScaling,
    LongRoPE,
    YaRN,
    axes_chosen,
    dynamic_base,
    yarn_magnitude,
)  # fmt: skip
from fastkernels.overrides.rope.rope_tables import Llama3, RopeModule, Span, inverse_frequencies
from fastkernels.overrides.rope.rotary_emb import rotary_emb

_ON_POLICY = "rl_on_policy_target requires the host's native kernel"
_GLM = "mrope_interleaved_glm is not supported"


class SGLangRotaryEmbedding_0_5_16(RopeModule):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding before 0.5.21: float32 cache on CUDA, else in `dtype`.

    forward: positions [T]; query, key as in `reference`. Returns (query, key), changed in place. With
    fused_set_kv_buffer_arg a live module uses the host's own kernel; standalone that is a ValueError.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not serve this module (ours or the host's), None if it does."""
        if getattr(module, "_force_native", False):
            return _ON_POLICY
        return None

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None, *, backend: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if backend is not None:
            return on_backend(self, backend, positions, query, key, offsets, fused_set_kv_buffer_arg)
        if fused_set_kv_buffer_arg is not None:
            host = getattr(self, f"forward_{query.device.type}", None)
            if host is None:
                raise ValueError(
                    "fused_set_kv_buffer_arg is not supported: store key and value with store_kvcache"
                )
            rotary_emb.note("fused_set_kv_buffer_arg: the host's own kernel stores key and value too")
            return host(positions, query, key, offsets, fused_set_kv_buffer_arg)
        at = positions if offsets is None else positions + offsets
        native = query.device.type == "cpu"  # there the host rounds after every operation
        rotary_emb(at, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style, native, native)
        return query, key


class SGLangRotaryEmbedding(SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.base.RotaryEmbedding, with the first cached position; see its base."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype, position_start: int = 0,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self.position_start = position_start
        self._make_cache(torch.float32 if torch.cuda.is_available() else dtype)

    def _spans(self) -> list[Span]:
        return [span._replace(start=self.position_start) for span in super()._spans()]


class SGLangLlama3RotaryEmbedding(Llama3, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.Llama3RotaryEmbedding; see SGLangRotaryEmbedding_0_5_16."""


class SGLangLinearScalingRotaryEmbedding(LinearScaling, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.base.LinearScalingRotaryEmbedding; see SGLangRotaryEmbedding_0_5_16."""


class SGLangDynamicNTKAlphaRotaryEmbedding(DynamicNTKAlpha, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.DynamicNTKAlphaRotaryEmbedding."""


class SGLangGemma4RotaryEmbedding(Gemma4, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.Gemma4RotaryEmbedding."""


class SGLangDynamicNTKScalingRotaryEmbedding(SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.DynamicNTKScalingRotaryEmbedding."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _spans(self) -> list[Span]:
        base = dynamic_base(self.base, self.scaling_factor**2 - (self.scaling_factor - 1), self.rotary_dim)
        rows = math.ceil(self.max_position_embeddings * self.scaling_factor)
        return [Span(inverse_frequencies(base, self.rotary_dim), rows)]


class SGLangYaRNScalingRotaryEmbedding(YaRN, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.yarn.YaRNScalingRotaryEmbedding; see SGLangRotaryEmbedding_0_5_16."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, extrapolation_factor: float = 1, attn_factor: float = 1,
        beta_fast: int = 32, beta_slow: int = 1, truncate: bool = True, mscale: float | None = None,
        mscale_all_dim: float | None = None,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        magnitude = yarn_magnitude(scaling_factor)
        if mscale is not None and mscale_all_dim is not None:
            magnitude = yarn_magnitude(scaling_factor, mscale) / yarn_magnitude(
                scaling_factor, mscale_all_dim
            )
        self.mscale = float(magnitude * attn_factor)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


class SGLangDeepseekScalingRotaryEmbedding(YaRN, SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.rope_variant.DeepseekScalingRotaryEmbedding.

    forward: as in SGLangRotaryEmbedding_0_5_16, without a KV buffer.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, extrapolation_factor: float = 1, attn_factor: float = 1,
        beta_fast: int = 32, beta_slow: int = 1, mscale: float = 1, mscale_all_dim: float = 0,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        over = yarn_magnitude(scaling_factor, mscale_all_dim)
        self.mscale = yarn_magnitude(scaling_factor, mscale) / over * attn_factor
        self.device = device if device is not None else torch.get_default_device().type
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def forward(  # type: ignore[override]
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None, *,
        backend: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if backend is not None:
            return on_backend(self, backend, positions, query, key, offsets)
        at = positions if offsets is None else positions + offsets
        native = query.device.type == "cpu"  # there the host rounds after every operation
        rotary_emb(at, query, key, self.head_size, self.cos_sin_cache, self.is_neox_style, native, native)
        return query, key


class SGLangMRotaryEmbedding(SGLangRotaryEmbedding_0_5_16):
    """sglang.srt.layers.rotary_embedding.mrope.MRotaryEmbedding.

    forward: positions [T], or temporal, height and width positions [3, T]; query, key as in `reference`. Returns
    (query, key), changed in place. With fused_set_kv_buffer_arg, ValueError: the host has no kernel for that either.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        dtype: torch.dtype, mrope_section: Sequence[int] | None = None, mrope_interleaved: bool = False,
        mrope_interleaved_glm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        if mrope_section and sum(mrope_section) != rotary_dim // 2:
            raise ValueError(
                f"mrope_section {list(mrope_section)} must sum to rotary_dim / 2 = {rotary_dim // 2}"
            )
        if mrope_interleaved_glm:
            raise ValueError(_GLM)
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self.mrope_interleaved_glm = mrope_interleaved_glm

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not serve this module (ours or the host's), None if it does."""
        if getattr(module, "mrope_interleaved_glm", False):
            return _GLM
        return _ON_POLICY if getattr(module, "_force_native", False) else None

    def forward(  # type: ignore[override]
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, fused_set_kv_buffer_arg: Any = None, *,
        backend: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if backend is not None:
            return on_backend(self, backend, positions, query, key, fused_set_kv_buffer_arg)
        if fused_set_kv_buffer_arg is not None:
            raise ValueError(
                "fused_set_kv_buffer_arg is not supported: store key and value with store_kvcache"
            )
        at, table = axes_chosen(positions, self.cos_sin_cache, self.mrope_section, self.mrope_interleaved)
        native = query.device.type == "cpu"  # there the host rounds after every operation
        rotary_emb(at, query, key, self.head_size, table, self.is_neox_style, True, native)
        return query, key


class SGLangYaRNScalingMRotaryEmbedding(YaRN, SGLangMRotaryEmbedding):
    """sglang.srt.layers.rotary_embedding.mrope.YaRNScalingMRotaryEmbedding; see SGLangMRotaryEmbedding."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: int, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False, extrapolation_factor: float = 1, attn_factor: float = 1, beta_fast: int = 32,
        beta_slow: int = 1, truncate: bool = True,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        self.mscale = float(yarn_magnitude(scaling_factor) * attn_factor)
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, mrope_section,
            mrope_interleaved,
        )  # fmt: skip


class SGLangPhi3LongRoPEScaledRotaryEmbedding(LongRoPE):
    """sglang.srt.layers.rotary_embedding.rope_variant.Phi3LongRoPEScaledRotaryEmbedding.

    forward: as in SGLangRotaryEmbedding_0_5_16, without a KV buffer. The second table serves batches that have a
    position beyond the original context.
    """

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        original = self.original_max_position_embeddings
        at = positions + (positions > original).any() * original
        at = at if offsets is None else at + offsets
        # The host rounds after every operation, on each device.
        rotary_emb(at, query, key, self.head_size, self.long_short_cos_sin_cache, True, True, True)
        return query, key


_ROPE = "sglang.srt.layers.rotary_embedding."


_SECTIONS = "Off by default: the rows of three positions are gathered before the kernel."


def _target(path: str, cls: str, versions: str = "", note: str = "") -> Target:
    return Target("sglang", _ROPE + path, cls, "leaf", versions, default=not note, note=note)


_DYNAMIC = "rope_variant:DynamicNTKScalingRotaryEmbedding"
_ALPHA = "rope_variant:DynamicNTKAlphaRotaryEmbedding"
_DEEPSEEK = "rope_variant:DeepseekScalingRotaryEmbedding"

TARGETS = {
    "rotary_emb": (
        _target("base:RotaryEmbedding", "SGLangRotaryEmbedding_0_5_16", "<0.5.21"),
        _target("base:RotaryEmbedding", "SGLangRotaryEmbedding", ">=0.5.21"),
        _target("rope_variant:Llama3RotaryEmbedding", "SGLangLlama3RotaryEmbedding"),
        _target("base:LinearScalingRotaryEmbedding", "SGLangLinearScalingRotaryEmbedding"),
        _target(_DYNAMIC, "SGLangDynamicNTKScalingRotaryEmbedding"),
        _target(_ALPHA, "SGLangDynamicNTKAlphaRotaryEmbedding"),
        _target("rope_variant:Gemma4RotaryEmbedding", "SGLangGemma4RotaryEmbedding"),
        _target("yarn:YaRNScalingRotaryEmbedding", "SGLangYaRNScalingRotaryEmbedding"),
        _target(_DEEPSEEK, "SGLangDeepseekScalingRotaryEmbedding"),
        _target("rope_variant:Phi3LongRoPEScaledRotaryEmbedding", "SGLangPhi3LongRoPEScaledRotaryEmbedding"),
        _target("mrope:MRotaryEmbedding", "SGLangMRotaryEmbedding", note=_SECTIONS),
        _target("mrope:YaRNScalingMRotaryEmbedding", "SGLangYaRNScalingMRotaryEmbedding", note=_SECTIONS),
    ),
}
