"""Drop-in deformable attention of transformers' RT-DETRv2; the projections stay the host's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.detection.deformable_attention import deformable_attention

METHODS = ("default", "discrete")


def _theirs(module: Any, reason: str) -> Any:
    """The host's forward of a live module, for a call that ours does not support."""
    deformable_attention.note(reason)
    return _hosts(module)


def _hosts(module: Any) -> Any:
    host: Any = type(module).__mro__[1]
    return host.forward.__get__(module)


class TransformersRTDetrV2MultiscaleDeformableAttention(nn.Module):
    """RTDetrV2MultiscaleDeformableAttention: hidden_states [B, Q, C] to the same, and the weights."""

    def __init__(self, config: Any):
        super().__init__()
        width, heads = config.d_model, config.decoder_attention_heads
        if width % heads:
            raise ValueError(f"d_model must be divisible by decoder_attention_heads, got {width} and {heads}")
        self.im2col_step, self.d_model, self.n_heads = 64, width, heads
        self.n_levels, self.n_points = config.decoder_n_levels, config.decoder_n_points
        count = heads * self.n_levels * self.n_points
        self.sampling_offsets, self.attention_weights = nn.Linear(width, 2 * count), nn.Linear(width, count)
        self.value_proj, self.output_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.offset_scale, self.method = config.decoder_offset_scale, config.decoder_method
        self.n_points_list = [self.n_points] * self.n_levels
        scale = torch.full((self.n_levels * self.n_points,), 1 / self.n_points)
        self.register_buffer("n_points_scale", scale)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.method not in METHODS:
            return f"its method is {module.method!r}"
        if set(module.n_points_list) != {module.n_points}:
            return f"its levels have different numbers of points: {module.n_points_list}"
        return None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        position_embeddings: torch.Tensor | None = None,
        reference_points=None,
        spatial_shapes=None,
        spatial_shapes_list=None,
        level_start_index=None,
        **kwargs,
    ):
        if reference_points.dim() != 4 or reference_points.shape[2:] != (1, 4):
            reason = f"reference points of shape {tuple(reference_points.shape)}"
            return _theirs(self, reason)(
                hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, position_embeddings,
                reference_points, spatial_shapes, spatial_shapes_list, level_start_index, **kwargs,
            )  # fmt: skip
        x = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.value_proj(encoder_hidden_states)
        if attention_mask is not None:
            value = value.masked_fill(~attention_mask[..., None], 0.0)
        points = self.n_levels * self.n_points
        offsets = self.sampling_offsets(x).unflatten(-1, (self.n_heads, points, 2))
        weights = torch.softmax(self.attention_weights(x).unflatten(-1, (self.n_heads, points)), -1)
        out = deformable_attention(
            value.unflatten(-1, (self.n_heads, -1)), offsets, weights, reference_points[:, :, 0],
            [int(n) for shape in spatial_shapes_list for n in shape], self.offset_scale, False,
            self.method == "discrete",
        )  # fmt: skip
        return self.output_proj(out), weights


TARGETS = {
    "deformable_attention": (
        Target(
            "transformers",
            "transformers.models.rt_detr_v2.modeling_rt_detr_v2:RTDetrV2MultiscaleDeformableAttention",
            "TransformersRTDetrV2MultiscaleDeformableAttention",
            "module",
            default=False,
            note="decided at first calls on a GPU, elsewhere replaced on request",
            tried=True,
        ),
    )
}
