"""SAM 3 for points, boxes and masks (Carion et al., arXiv 2511.16719): the object in an image that these mark.

The model is that of SAM (Kirillov et al., arXiv 2304.02643) behind SAM 3's backbone. A mask decoder turns the image and
the marks into several masks, with a prediction of the overlap of each with the object. sam3_video.py tracks with it.
The interface is that of models/common/interfaces/segmenter.py.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.segmenter import NO_POINT, Marked, MarkSegmenter, Seen
from fastkernels.models.common.layers import cnn
from fastkernels.models.vision import sam3
from fastkernels.models.vision.sam3 import EPS, PLAIN, Weight
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.linear.batched_matmul import batched_matmul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.norm.vllm import VllmLayerNorm

T = torch.Tensor
CONV_EPS = 1e-6  # of the norms between convolutions
LEVELS = [4.0, 2.0, 1.0]


class Attention(nn.Module):
    """Attention of rows [B, S, C] to others, in `inner` channels. memory: channels of keys and values."""

    ops = ("attention_dense", "linear_residual")

    def __init__(self, width: int, inner: int, heads: int, memory: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = cnn.Classifier(width, inner)
        self.k_proj, self.v_proj = (cnn.Classifier(memory or width, inner) for _ in range(2))
        self.o_proj = cnn.Classifier(inner, width)

    def project(self, x: T, keys: T, values: T) -> tuple[T, T, T]:
        """Queries, keys and values [B, S, heads, D]."""
        made = self.q_proj(x), self.k_proj(keys), self.v_proj(values)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in made)
        return q, k, v

    def finish(self, mixed: T, residual: T) -> T:
        return linear_residual(residual, mixed.flatten(2), self.o_proj.weight, self.o_proj.bias)

    def forward(self, x: T, keys: T, values: T, residual: T) -> T:
        q, k, v = self.project(x, keys, values)
        return self.finish(attention_dense(q, k, v, q.shape[-1] ** -0.5), residual)


def _normed(image: T, norm: nn.Module) -> T:
    """A norm over the channels of an image [B, C, H, W], channels last."""
    return norm(image.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)


def _gelu(x: T) -> T:
    return F.gelu(x)


def _product(rows: T, conv: cnn.Conv) -> T:
    """A convolution of single pixels, of rows [B, S, C]."""
    return linear(rows, conv.weight.flatten(1), conv.bias)


class Layers(nn.Module):
    """Linear layers with ReLU between them, called proj_in, layers and proj_out."""

    def __init__(self, size: int, inner: int, out: int, count: int) -> None:
        super().__init__()
        self.proj_in, self.proj_out = cnn.Classifier(size, inner), cnn.Classifier(inner, out)
        self.layers = nn.ModuleList(cnn.Classifier(inner, inner) for _ in range(count - 2))

    def forward(self, x: T) -> T:
        x = F.relu_(self.proj_in(x))
        for layer in self.layers:
            x = F.relu_(layer(x))
        return self.proj_out(x)


class TwoWayLayer(nn.Module):
    """Attention among tokens, of tokens to cells, an MLP of tokens, and attention of cells to tokens; norms after."""

    def __init__(self, config: Any, first: bool) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        inner, self.first = width // config.attention_downsample_rate, first
        self.self_attn = sam3.SelfAttention(width, heads)
        self.cross_attn_token_to_image = Attention(width, inner, heads)
        self.cross_attn_image_to_token = Attention(width, inner, heads)
        self.mlp = Layers(width, config.mlp_dim, width, config.num_hidden_layers)
        self.layer_norm1, self.layer_norm2, self.layer_norm3, self.layer_norm4 = (
            VllmLayerNorm(width, EPS) for _ in range(4)
        )

    def forward(self, x: T, cells: T, own: T, places: T) -> tuple[T, T]:
        """x: tokens [B, n, C]; own: the tokens before the first layer; places: of the cells [1, S, C]."""
        none = torch.zeros_like(x) if self.first else x
        x = self.layer_norm1(self.self_attn(x, None if self.first else own, none))
        x = self.layer_norm2(self.cross_attn_token_to_image(x + own, cells + places, cells, x))
        x = self.layer_norm3(x + self.mlp(x))
        cells = self.cross_attn_image_to_token(cells + places, x + own, x, cells)
        return x, self.layer_norm4(cells)


class Upscale(cnn.Folded):
    """A transposed convolution of 2 x 2 pixels with stride 2: after loading, a matrix."""

    ops = ("linear",)

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, out, 2, 2))
        self.bias = nn.Parameter(torch.empty(out))

    @torch.no_grad()
    def merge(self) -> None:
        """Rows in the order of the four pixels, then of the channels."""
        matrix = self.weight.permute(2, 3, 1, 0).flatten(0, 2).contiguous()
        self.weight, self.bias = nn.Parameter(matrix), nn.Parameter(self.bias.repeat(4))

    def forward(self, x: T, side: int) -> T:
        return sam3._apart(linear(x, self.weight, self.bias), side)


class MaskDecoder(nn.Module):
    """Masks of an object in an image: one for marks that are clear, then several for those that are not."""

    ops = ("batched_matmul",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.config = config.hidden_size, config
        self.count = config.num_multimask_outputs + 1
        inner = width // config.attention_downsample_rate
        self.iou_token, self.obj_score_token = Weight(1, width), Weight(1, width)
        self.mask_tokens = Weight(self.count, width)
        self.transformer: Any = nn.Module()
        self.transformer.layers = nn.ModuleList(
            TwoWayLayer(config, i == 0) for i in range(config.num_hidden_layers)
        )
        self.transformer.final_attn_token_to_image = Attention(width, inner, config.num_attention_heads)
        self.transformer.layer_norm_final_attn = VllmLayerNorm(width, EPS)
        self.upscale_conv1, self.upscale_conv2 = (
            Upscale(width, width // 4),
            Upscale(width // 4, width // 8),
        )
        self.upscale_layer_norm = VllmLayerNorm(width // 4, CONV_EPS)
        self.output_hypernetworks_mlps = nn.ModuleList(
            Layers(width, width, width // 8, 3) for _ in range(self.count)
        )
        self.iou_prediction_head = Layers(
            width, config.iou_head_hidden_dim, self.count, config.iou_head_depth
        )
        self.pred_obj_score_head = Layers(width, width, 1, 3)
        self.conv_s0, self.conv_s1 = (
            cnn.Conv(width, width // 8, bias=True),
            cnn.Conv(width, width // 4, bias=True),
        )

    def forward(self, cells: T, fine: T, middle: T, places: T, prompt: T, side: int) -> tuple[T, T, T, T]:
        """cells [B, S, C]; fine, middle: of the larger levels [1 or B, cells, C / 8 and C / 4]; prompt [B, n, C].

        Returns the masks' logits [B, count, h, w], their predicted overlaps [B, count], their tokens [B, count, C] and
        the logit of presence [B]; float32 but for the tokens.
        """
        tokens = torch.cat((self.obj_score_token.weight, self.iou_token.weight, self.mask_tokens.weight))
        own = torch.cat((tokens[None].expand(len(cells), -1, -1), prompt), 1)
        x, inner = own, self.transformer
        for layer in inner.layers:
            x, cells = layer(x, cells, own, places)
        x = inner.layer_norm_final_attn(
            inner.final_attn_token_to_image(x + own, cells + places, cells, x.contiguous())
        )
        up = _gelu(self.upscale_layer_norm(self.upscale_conv1(cells, side) + middle))
        up = _gelu(self.upscale_conv2(up, 2 * side) + fine)  # [B, 16 * S, C / 8]
        made = x[:, 2 : 2 + self.count]
        rows = torch.stack([net(made[:, i]) for i, net in enumerate(self.output_hypernetworks_mlps)], 1)
        masks = batched_matmul(rows, up.transpose(1, 2)).float().unflatten(2, (4 * side, 4 * side))
        overlaps = self.iou_prediction_head(x[:, 1]).float().sigmoid()
        return masks, overlaps, made, self.pred_obj_score_head(x[:, 0]).float().flatten()

    def best(self, overlaps: T) -> T:
        """The number of the best of several masks of each object [B]."""
        return overlaps[:, 1:].argmax(1) + 1

    def single(self, masks: T, overlaps: T) -> T:
        """The number of the one mask of each object [B]: the first, or the best of the others if it is not stable."""
        config, best = self.config, self.best(overlaps)
        if not config.dynamic_multimask_via_stability:
            return torch.zeros_like(best)
        first, delta = masks[:, 0].flatten(1), config.dynamic_multimask_stability_delta
        inner, outer = (first > delta).sum(1).float(), (first > -delta).sum(1).float()
        stable = torch.where(outer > 0, inner / outer, 1.0) >= config.dynamic_multimask_stability_thresh
        return torch.where(stable, 0, best)


class MaskPrompt(nn.Module):
    """A mask [B, 1, 4 * side, 4 * side] to cells [B, S, C]."""

    ops = ("conv_norm_act",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        channels = config.mask_input_channels
        self.conv1 = cnn.Conv(1, channels // 4, 2, 2, bias=True, padding=0)
        self.conv2 = cnn.Conv(channels // 4, channels, 2, 2, bias=True, padding=0)
        self.conv3 = cnn.Conv(channels, config.hidden_size, bias=True)
        self.layer_norm1 = VllmLayerNorm(channels // 4, config.layer_norm_eps)
        self.layer_norm2 = VllmLayerNorm(channels, config.layer_norm_eps)

    def forward(self, masks: T) -> T:
        x = _gelu(_normed(cnn.convolve(masks, self.conv1, None, PLAIN), self.layer_norm1))
        x = _gelu(_normed(cnn.convolve(x, self.conv2, None, PLAIN), self.layer_norm2))
        return _product(sam3._rows(x), self.conv3)


def _resized(masks: T, size: tuple[int, int]) -> T:
    """Masks [B, 1, h, w] float32 of another size, each pixel the mean of those that it covers."""
    if masks.shape[2:] == size:
        return masks
    return F.interpolate(masks, size=size, mode="bilinear", antialias=True)


class PromptEncoder(nn.Module):
    """Marks to tokens [B, n, C]: of points, and of the two corners of a box."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.size = config.image_size
        self.shared_embedding: Any = Waves(width)
        self.mask_embed = MaskPrompt(config)
        self.no_mask_embed, self.not_a_point_embed = Weight(1, width), Weight(1, width)
        self.point_embed = Weight(config.num_point_embeddings, width)

    def forward(self, points: T, labels: T) -> T:
        """points [B, n, 2] float32: x and y in pixels of the model's image; labels [B, n]: see MarkSegmenter."""
        known = labels[..., None] != NO_POINT
        kinds = F.embedding(labels.clamp(min=0), self.point_embed.weight)
        placed = self.shared_embedding((points + 0.5) / self.size).to(kinds.dtype) + kinds
        return torch.where(known, placed, self.not_a_point_embed.weight)


class Waves(nn.Module):
    """Places in parts of the image [..., 2] to sines and cosines of random waves [..., C], float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.empty(2, width // 2))

    def forward(self, places: T) -> T:
        angles = 2 * math.pi * ((2 * places - 1) @ self.positional_embedding.float())
        return torch.cat((angles.sin(), angles.cos()), -1)


class Marking(nn.Module):
    """Masks of the objects in images that points, boxes and masks mark. config: of a tracker. side: of the cells."""

    def __init__(self, config: Any, side: int) -> None:
        super().__init__()
        self.side = side
        self.shared_image_embedding: Any = Waves(config.prompt_encoder_config.hidden_size)
        self.prompt_encoder = PromptEncoder(config.prompt_encoder_config)
        self.mask_decoder = MaskDecoder(config.mask_decoder_config)

    @cached_property
    def places(self) -> T:
        """Encodings of the cells [1, S, C]."""
        waves = self.shared_image_embedding.positional_embedding
        at = (torch.arange(self.side, device=waves.device) + 0.5) / self.side
        grid = torch.stack((at.repeat(self.side), at.repeat_interleave(self.side)), 1)
        return self.shared_image_embedding(grid)[None].to(waves.dtype)

    def levels(self, fine: T, middle: T, cells: T) -> Seen:
        """The levels of a pyramid [B, cells, C] as the decoder reads them."""
        decoder = self.mask_decoder
        return Seen(_product(fine, decoder.conv_s0), _product(middle, decoder.conv_s1), cells)

    def mark(self, seen: Seen, points: T, labels: T, masks: T | None = None) -> Marked:
        """See MarkSegmenter."""
        prompts, decoder = self.prompt_encoder, self.mask_decoder
        if masks is None:
            dense = prompts.no_mask_embed.weight
        else:
            dense = prompts.mask_embed(masks.to(seen.cells.dtype))
        found, overlaps, _, presence = decoder(
            seen.cells + dense, seen.fine, seen.middle, self.places, prompts(points, labels), self.side
        )
        return Marked(found, overlaps, decoder.single(found, overlaps), presence)


def check_marks(own: Any, vision: Any) -> None:
    """Raise Unsupported for what Marking does not do. own, vision: configs of a tracker and of its image encoder."""
    decoder, prompts, backbone = own.mask_decoder_config, own.prompt_encoder_config, vision.backbone_config
    width = vision.fpn_hidden_size
    for name, value in (
        ("mask_decoder_config.hidden_size", decoder.hidden_size),
        ("prompt_encoder_config.hidden_size", prompts.hidden_size),
    ):
        if value != width:
            raise Unsupported(f"config.{name}={value} is not vision_config.fpn_hidden_size={width}")
    if prompts.image_size != backbone.image_size or prompts.patch_size != backbone.patch_size:
        raise Unsupported(
            f"config.prompt_encoder_config has image_size={prompts.image_size} and patch_size={prompts.patch_size},"
            f" and the backbone {backbone.image_size} and {backbone.patch_size}"
        )
    if prompts.hidden_act != "gelu":
        raise Unsupported(
            f"config.prompt_encoder_config.hidden_act={prompts.hidden_act!r} is not supported, only 'gelu'"
        )
    if prompts.num_point_embeddings < 4:
        raise Unsupported(
            f"config.prompt_encoder_config.num_point_embeddings={prompts.num_point_embeddings} is less than 4: a box"
            " has labels 2 and 3"
        )
    inner = width // decoder.attention_downsample_rate
    if inner % decoder.num_attention_heads or width % decoder.num_attention_heads:
        raise Unsupported(
            f"{inner} channels of the mask decoder's attention are no multiple of its {decoder.num_attention_heads}"
            " heads"
        )


class Sam3TrackerModel(Marking, MarkSegmenter):
    """config: transformers.Sam3TrackerConfig. Raises Unsupported."""

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        sam3.check_backbone(vision)
        if list(vision.scale_factors[:3]) != LEVELS:
            raise Unsupported(
                f"vision_config.scale_factors={vision.scale_factors} do not begin with {LEVELS}, which the mask decoder"
                " reads"
            )
        check_marks(config, vision)
        backbone = vision.backbone_config
        super().__init__(config, backbone.image_size // backbone.patch_size)
        self.patch_size = backbone.patch_size
        self.vision_encoder: Any = nn.Module()
        self.vision_encoder.backbone = sam3.ViT(backbone)
        self.vision_encoder.neck = sam3.Neck(vision, len(LEVELS))
        # transformers adds it to the last level of the config, which the decoder reads only if there are three.
        self.no_memory_embedding = None
        if len(vision.scale_factors) == len(LEVELS):
            self.no_memory_embedding = nn.Parameter(torch.empty(1, 1, vision.fpn_hidden_size))

    @property
    def dtype(self) -> torch.dtype:
        return self.shared_image_embedding.positional_embedding.dtype

    def look(self, patches: T) -> Seen:
        x = self.vision_encoder.backbone(patches)
        fine, middle, cells = (level(x, self.side) for level in self.vision_encoder.neck.fpn_layers)
        if self.no_memory_embedding is not None:
            cells = cells + self.no_memory_embedding
        return self.levels(fine, middle, cells)


def unneeded(config: Any) -> list[str]:
    """Patterns of the keys of levels that the model does not read."""
    if len(config.vision_config.scale_factors) == len(LEVELS):
        return []
    return ["no_memory_embedding", f"vision_encoder.neck.fpn_layers.{len(LEVELS)}.*"]


ARCH = Architecture(
    names=("Sam3TrackerModel",),
    category="vision",
    model="Sam3TrackerModel",
    runner="Encode",
    model_type="sam3_tracker",
    inputs="images",
    prefixes={  # as transformers 5 saves it
        "tracker_model.detector_model.vision_encoder.": "vision_encoder.",
        "tracker_model.tracker_neck.": "vision_encoder.neck.",
        "tracker_model.": "",
    },
    packed={"qkv": ("q_of_all", "k_of_all", "v_of_all"), "qk_proj": ("q_of_self", "k_of_self")},
    parts={
        "attention.q_proj": "attention.q_of_all",
        "attention.k_proj": "attention.k_of_all",
        "attention.v_proj": "attention.v_of_all",
        "self_attn.q_proj": "self_attn.q_of_self",
        "self_attn.k_proj": "self_attn.k_of_self",
        "self_attn.out_proj": "self_attn.o_proj",
    },
    unneeded="fastkernels.models.vision.sam3_tracker:unneeded",
)
