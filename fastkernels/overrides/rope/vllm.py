"""vLLM's classes of rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.rope.rope_scaling import (
    DynamicNTKAlpha,
    Gemma4,
    LinearScaling,
    LongRoPE,
    YaRN,
    axes_chosen,
    dynamic_base,
    ntk_frequencies,
    yarn_magnitude,
)  # fmt: skip
from fastkernels.overrides.rope.rope_tables import Llama3, RopeModule, Span, inverse_frequencies, rotate
from fastkernels.overrides.rope.rope_types import ROPE_TYPES
from fastkernels.overrides.rope.rotary_emb import rotary_emb


class VllmRotaryEmbedding(RopeModule):
    """vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding: the cache is kept in `dtype`.

    forward: positions [T]; query, key as in `reference`, key may be None. Returns (query, key), changed in place; new
    tensors under torch.compile.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, init_cache: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        if init_cache:
            self._make_cache(dtype)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        how = (self.head_size, self.cos_sin_cache, self.is_neox_style, True, False)
        return rotate(rotary_emb, positions, query, key, *how)


class VllmLlama3RotaryEmbedding(Llama3, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.llama3_rope.Llama3RotaryEmbedding; see VllmRotaryEmbedding."""


class VllmLinearScalingRotaryEmbedding(LinearScaling, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.linear_scaling_rope.LinearScalingRotaryEmbedding."""


class VllmDynamicNTKAlphaRotaryEmbedding(DynamicNTKAlpha, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope.DynamicNTKAlphaRotaryEmbedding."""


class VllmGemma4RotaryEmbedding(Gemma4, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.gemma4_rope.Gemma4RotaryEmbedding."""


class VllmNTKScalingRotaryEmbedding(VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope.NTKScalingRotaryEmbedding."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, mixed_b: float | None = None,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.mixed_b = mixed_b
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _inv_freq(self) -> torch.Tensor:
        return ntk_frequencies(self.base, self.rotary_dim, self.scaling_factor, self.mixed_b)


class VllmDynamicNTKScalingRotaryEmbedding(VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, max_trained_positions: int, base: float,
        is_neox_style: bool, scaling_factor: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.max_trained_positions = max_trained_positions
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _inv_freq(self) -> torch.Tensor:
        longer = self.scaling_factor * self.max_position_embeddings / self.max_trained_positions
        base = dynamic_base(self.base, longer - (self.scaling_factor - 1), self.rotary_dim)
        return inverse_frequencies(base, self.rotary_dim)


class VllmYaRNScalingRotaryEmbedding(YaRN, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope.YaRNScalingRotaryEmbedding."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, beta_fast: int = 32, beta_slow: int = 1,
        mscale: float | None = None, mscale_all_dim: float | None = None, attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        self.mscale = _magnitude(scaling_factor, mscale, mscale_all_dim, attention_factor)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


class VllmYaRNScalingRotaryEmbedding_0_26(YaRN, VllmRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope.YaRNScalingRotaryEmbedding before 0.32."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, extrapolation_factor: float = 1, attn_factor: float = 1,
        beta_fast: int = 32, beta_slow: int = 1, apply_yarn_scaling: bool = True, truncate: bool = True,
    ) -> None:  # fmt: skip
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        self.mscale = float(attn_factor * (yarn_magnitude(scaling_factor) if apply_yarn_scaling else 1.0))
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)


def _magnitude(factor: float, mscale: float | None, over: float | None, given: float | None) -> float:
    if given is not None:
        return float(given)
    if mscale and over:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, over)
    return yarn_magnitude(factor)


class VllmDeepseekScalingRotaryEmbedding(YaRN):
    """vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope.DeepseekScalingRotaryEmbedding.

    forward: as in VllmRotaryEmbedding; positions + offsets, and the cache as it is: float32 where the host keeps it so.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, beta_fast: int = 32, beta_slow: int = 1, mscale: float = 1,
        mscale_all_dim: float = 0, init_cache: bool = True,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.scaling_factor = scaling_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        over = yarn_magnitude(scaling_factor, mscale_all_dim)
        self.mscale = yarn_magnitude(scaling_factor, mscale) / over * getattr(self, "attn_factor", 1)
        self._setup(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        if init_cache:
            self._make_cache(dtype)

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = positions if offsets is None else positions + offsets
        native = not query.is_cuda  # there the host rounds after every operation
        how = (self.head_size, self.cos_sin_cache, self.is_neox_style, False, native)
        return rotate(rotary_emb, at, query, key, *how)


class VllmDeepseekScalingRotaryEmbedding_0_26(VllmDeepseekScalingRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope.DeepseekScalingRotaryEmbedding before 0.32."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        scaling_factor: float, dtype: torch.dtype, *, extrapolation_factor: float = 1, attn_factor: float = 1,
        beta_fast: int = 32, beta_slow: int = 1, mscale: float = 1, mscale_all_dim: float = 0, init_cache: bool = True,
    ) -> None:  # fmt: skip
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, scaling_factor, dtype,
            beta_fast=beta_fast, beta_slow=beta_slow, mscale=mscale, mscale_all_dim=mscale_all_dim,
            init_cache=init_cache,
        )  # fmt: skip


class VllmMRotaryEmbedding(YaRN):
    """vllm.model_executor.layers.rotary_embedding.mrope.MRotaryEmbedding: with scaling_factor, YaRN's table.

    forward: positions [T], or temporal, height and width positions [3, T]; query, key as in `reference`. The host
    does not use offsets. Returns (query, key), changed in place; new tensors under torch.compile.
    """

    scaling_factor: float | None  # type: ignore[assignment]

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, mrope_section: Sequence[int] | None = None, mrope_interleaved: bool = False, *,
        positions_factor: int = 4, scaling_factor: float | None = None, beta_fast: int = 32, beta_slow: int = 1,
        mscale: float | None = None, mscale_all_dim: float | None = None, attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        if mrope_section and sum(mrope_section) != rotary_dim // 2:
            raise ValueError(
                f"mrope_section {list(mrope_section)} must sum to rotary_dim / 2 = {rotary_dim // 2}"
            )
        self.scaling_factor = scaling_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        self.mscale = 1.0
        if scaling_factor is not None:
            self.mscale = _magnitude(scaling_factor, mscale, mscale_all_dim, attention_factor)
        self.cache_max_position_num = max_position_embeddings * positions_factor
        self._setup(head_size, rotary_dim, self.cache_max_position_num, base, is_neox_style, dtype)
        self.mrope_section = mrope_section
        self.mrope_interleaved = mrope_interleaved
        self._make_cache(dtype)

    def _spans(self) -> list[Span]:
        return super()._spans() if self.scaling_factor is not None else RopeModule._spans(self)

    def _inv_freq(self) -> torch.Tensor:
        return super()._inv_freq() if self.scaling_factor is not None else RopeModule._inv_freq(self)

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        at, table = axes_chosen(positions, self.cos_sin_cache, self.mrope_section, self.mrope_interleaved)
        native = not query.is_cuda  # there the host rounds after every operation
        return rotate(rotary_emb, at, query, key, self.head_size, table, self.is_neox_style, True, native)


class VllmMRotaryEmbedding_0_26(VllmMRotaryEmbedding):
    """vllm.model_executor.layers.rotary_embedding.mrope.MRotaryEmbedding before 0.32."""

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, mrope_section: Sequence[int] | None = None, mrope_interleaved: bool = False, *,
        scaling_factor: float | None = None, extrapolation_factor: float = 1, attn_factor: float = 1,
        beta_fast: int = 32, beta_slow: int = 1, truncate: bool = True,
    ) -> None:  # fmt: skip
        self.extrapolation_factor = extrapolation_factor
        self.attn_factor = attn_factor
        magnitude = None if scaling_factor is None else yarn_magnitude(scaling_factor) * attn_factor
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, mrope_section,
            mrope_interleaved, scaling_factor=scaling_factor, beta_fast=beta_fast, beta_slow=beta_slow,
            attention_factor=magnitude, truncate=truncate,
        )  # fmt: skip


class VllmPhi3LongRoPEScaledRotaryEmbedding(LongRoPE):
    """vllm...rotary_embedding.phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding.

    forward: as in VllmMRotaryEmbedding, positions [T]. use_long_rope: the second table, for every position. The host
    sets it where its max_model_len exceeds the original context; here, where max_position_embeddings does.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, original_max_position_embeddings: int,
        base: float, is_neox_style: bool, dtype: torch.dtype, short_factor: list[float], long_factor: list[float],
        short_mscale: float | None = None, long_mscale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, original_max_position_embeddings, base, is_neox_style,
            dtype, short_factor, long_factor, short_mscale, long_mscale,
        )  # fmt: skip
        self.use_long_rope = max_position_embeddings > original_max_position_embeddings

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        at = positions + self.original_max_position_embeddings if self.use_long_rope else positions
        at = at if offsets is None else at + offsets
        # The host rounds after every operation, on each device.
        how = (self.head_size, self.long_short_cos_sin_cache, True, True, True)
        return rotate(rotary_emb, at, query, key, *how)


class ChosenLongRoPE(VllmRotaryEmbedding):
    """LongRoPE with one of its tables, for every position of every request.

    max_model_len: the longest sequence; over the original context the long factors are used, as vLLM does. Otherwise
    the keys of a sequence that crosses that length, or shares a prefix with a longer one, would be rotated differently.
    """

    def __init__(
        self, head_size: int, rotary_dim: int, max_position_embeddings: int, base: float, is_neox_style: bool,
        dtype: torch.dtype, factors: Sequence[float], magnitude: float,
    ) -> None:  # fmt: skip
        self.factors, self.magnitude = factors, magnitude
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _spans(self) -> list[Span]:
        factors = torch.tensor(self.factors, dtype=torch.float32, device="cpu")
        return [Span(self._inv_freq() / factors, self.max_position_embeddings, magnitude=self.magnitude)]


# Classes whose forward is `rotary_emb` with their cos_sin_cache
OF_TABLES = (
    VllmRotaryEmbedding, VllmLlama3RotaryEmbedding, VllmLinearScalingRotaryEmbedding, VllmYaRNScalingRotaryEmbedding,
    ChosenLongRoPE, VllmGemma4RotaryEmbedding,
)  # fmt: skip


class VllmApplyRotaryEmb(nn.Module):
    """vllm.model_executor.layers.rotary_embedding.common.ApplyRotaryEmb: the rotation, with given cosines and sines.

    forward: x [S, H, D] or [B, S, H, D]; cos, sin [S, rotary_dim / 2]. Returns a new tensor.
    """

    def __init__(
        self, enforce_enable: bool = False, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> None:
        super().__init__()
        self.is_neox_style = is_neox_style
        self.enable_fp32_compute = enable_fp32_compute

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        new = x.clone(memory_format=torch.contiguous_format)
        tokens = math.prod(x.shape[:-2])
        positions = torch.arange(tokens, device=x.device) % cos.shape[0]
        rounds = not self.enable_fp32_compute
        native = rounds and not x.is_cuda  # there the host rounds after every operation
        table = torch.cat((cos, sin), dim=-1)
        rotary_emb(
            positions, new.flatten(0, -3), None, x.shape[-1], table, self.is_neox_style, rounds, native
        )
        return new


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> VllmRotaryEmbedding | VllmMRotaryEmbedding:
    """The module for a Hugging Face config's rope_parameters (rope_theta, rope_type, partial_rotary_factor, ...).

    For 'longrope' they may also hold max_model_len, see ChosenLongRoPE; by default it is max_position. With
    mrope_section the positions may have three axes.
    Raises ValueError for a rope_type other than 'default' and those of ROPE_TYPES, or a missing parameter.
    """
    p = dict(rope_parameters or {})
    kind = p.get("rope_type", p.get("type", "default"))
    base, rotary_dim = (
        float(p.get("rope_theta", 10000.0)),
        int(head_size * p.get("partial_rotary_factor", 1.0)),
    )
    args = (head_size, rotary_dim, max_position, base, is_neox_style)
    dtype = dtype or torch.get_default_dtype()
    if section := p.get("mrope_section"):
        if kind != "default":
            raise ValueError(f"rope_type {kind!r} with mrope_section is not supported, only 'default'")
        turns = bool(p.get("mrope_interleaved", False))
        # Media take fewer positions than tokens, so that the table needs no more rows
        return VllmMRotaryEmbedding(*args, dtype, section, turns, positions_factor=1)
    if kind == "default":
        return VllmRotaryEmbedding(*args, dtype)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported; known: default, {', '.join(ROPE_TYPES)}")
    missing = [n for n in ROPE_TYPES[kind] if p.get(n) is None]
    if missing:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)} in rope_parameters")
    if kind == "proportional":
        if p.get("factor", 1.0) != 1.0:
            raise ValueError(f"rope_type 'proportional' with factor {p['factor']:g} is not supported, only 1")
        return VllmGemma4RotaryEmbedding(*args, dtype)
    if kind == "linear":
        factor = float(
            p["factor"]
        )  # the class adds rows for the factor, and max_position counts them already
        rows = math.ceil(max_position / factor)
        return VllmLinearScalingRotaryEmbedding(
            head_size, rotary_dim, rows, base, is_neox_style, factor, dtype
        )
    if kind == "yarn":
        return _yarn(head_size, rotary_dim, max_position, base, is_neox_style, p, dtype)
    if kind == "longrope":
        return _longrope(head_size, rotary_dim, max_position, base, is_neox_style, p, dtype)
    return VllmLlama3RotaryEmbedding(*args, dtype, *(p[n] for n in ROPE_TYPES[kind]))


def _yarn(
    head_size: int, rotary_dim: int, max_position: int, base: float, is_neox_style: bool, p: Mapping[str, Any],
    dtype: torch.dtype,
) -> VllmRotaryEmbedding:  # fmt: skip
    """YaRN with transformers' defaults: without a factor, it is max_position over the original length."""
    original = p["original_max_position_embeddings"]
    factor = float(p.get("factor") or max_position / original)
    made = VllmYaRNScalingRotaryEmbedding(
        head_size, rotary_dim, original, base, is_neox_style, factor, dtype,
        beta_fast=p.get("beta_fast") or 32, beta_slow=p.get("beta_slow") or 1, mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"), attention_factor=p.get("attention_factor"),
        truncate=p.get("truncate", True),
    )  # fmt: skip
    if len(made.cos_sin_cache) < max_position:  # as vLLM's, unlike transformers'
        made.least_rows = max_position
        made._make_cache(dtype)
    return made


def _longrope(
    head_size: int, rotary_dim: int, max_position: int, base: float, is_neox_style: bool, p: Mapping[str, Any],
    dtype: torch.dtype,
) -> VllmRotaryEmbedding:  # fmt: skip
    """LongRoPE with transformers' defaults: without a factor, it is max_position over the original length."""
    original = p["original_max_position_embeddings"]
    longest = p.get("max_model_len") or max_position
    name = "long_factor" if longest > original else "short_factor"
    if len(p[name]) != rotary_dim // 2:
        raise ValueError(
            f"rope_type 'longrope' needs {rotary_dim // 2} numbers in {name}, half of the {rotary_dim} rotated"
            f" channels, got {len(p[name])}"
        )
    factor, magnitude = float(p.get("factor") or max_position / original), p.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    args = (head_size, rotary_dim, max_position, base, is_neox_style, dtype)
    return ChosenLongRoPE(*args, p[name], magnitude)


_ROPE = "vllm.model_executor.layers.rotary_embedding."
_CLONES = "Off by default: a copy and a kernel, where the host's kernel writes its result itself."


_SECTIONS = "Off by default: the rows of three positions are gathered before the kernel."


def _target(path: str, cls: str, versions: str = "", note: str = "") -> Target:
    return Target("vllm", _ROPE + path, cls, "leaf", versions, default=not note, note=note)


_YARN = "yarn_scaling_rope:YaRNScalingRotaryEmbedding"
_DEEPSEEK = "deepseek_scaling_rope:DeepseekScalingRotaryEmbedding"
_MROPE = "mrope:MRotaryEmbedding"
_DYNAMIC = "dynamic_ntk_scaling_rope:DynamicNTKScalingRotaryEmbedding"
_ALPHA = "dynamic_ntk_alpha_rope:DynamicNTKAlphaRotaryEmbedding"
_LONG = "phi3_long_rope_scaled_rope:Phi3LongRoPEScaledRotaryEmbedding"
_LINEAR = "linear_scaling_rope:LinearScalingRotaryEmbedding"

TARGETS = {
    "rotary_emb": (
        _target("base:RotaryEmbedding", "VllmRotaryEmbedding"),
        _target("llama3_rope:Llama3RotaryEmbedding", "VllmLlama3RotaryEmbedding"),
        _target(_LINEAR, "VllmLinearScalingRotaryEmbedding"),
        _target("ntk_scaling_rope:NTKScalingRotaryEmbedding", "VllmNTKScalingRotaryEmbedding"),
        _target(_DYNAMIC, "VllmDynamicNTKScalingRotaryEmbedding"),
        _target(_ALPHA, "VllmDynamicNTKAlphaRotaryEmbedding"),
        _target("gemma4_rope:Gemma4RotaryEmbedding", "VllmGemma4RotaryEmbedding"),
        _target(_YARN, "VllmYaRNScalingRotaryEmbedding_0_26", "<0.32"),
        _target(_YARN, "VllmYaRNScalingRotaryEmbedding", ">=0.32"),
        _target(_DEEPSEEK, "VllmDeepseekScalingRotaryEmbedding_0_26", "<0.32"),
        _target(_DEEPSEEK, "VllmDeepseekScalingRotaryEmbedding", ">=0.32"),
        _target(_LONG, "VllmPhi3LongRoPEScaledRotaryEmbedding"),
        _target(_MROPE, "VllmMRotaryEmbedding_0_26", "<0.32", _SECTIONS),
        _target(_MROPE, "VllmMRotaryEmbedding", ">=0.32", _SECTIONS),
        _target("common:ApplyRotaryEmb", "VllmApplyRotaryEmb", note=_CLONES),
    ),
}
