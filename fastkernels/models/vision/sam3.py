"""SAM 3 (Carion et al., arXiv 2511.16719): the objects in an image that a text or example boxes name, with masks.

The interface is that of interfaces/segmenter.py. Tokens of the backbone are in the order of its windows, so that the
windows of most layers are slices. Images are channels last throughout: levels of features are [B, cells, channels].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.segmenter import NO_BOX, Found, Segmenter
from fastkernels.models.common.layers import cnn
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.overrides.activation.quick_gelu import quick_gelu
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.dense_attention.grid_bias_attention import grid_bias_attention
from fastkernels.overrides.detection.box_position_bias import box_position_bias
from fastkernels.overrides.detection.refine_boxes import refine_boxes
from fastkernels.overrides.detection.roi_align import roi_align
from fastkernels.overrides.diffusion.group_norm import group_norm
from fastkernels.overrides.linear.batched_matmul import batched_matmul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.vllm import VllmLayerNorm
from fastkernels.overrides.rope.rope_nd import rope_nd

T = torch.Tensor
GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
ACTIVATE: dict[str, Callable[[T], T]] = {"relu": F.relu_, "quick_gelu": quick_gelu, "silu": F.silu}
BACKBONE, TEXT = "sam3_vit_model", "clip_text_model"
EPS = 1e-5  # of the norms outside of the backbone
LOGIT_EPS = 1e-3  # of boxes before they are refined
MOST_LOGIT, MOST_PRESENCE = 12.0, 10.0
GROUPS = 8  # of the norms of the mask decoder
TEMPERATURE = 10000.0  # of the encodings of positions
WIDTHS = ("geometry_encoder_config", "detr_encoder_config", "detr_decoder_config", "mask_decoder_config")


def check_backbone(vision: Any) -> None:
    """Raise Unsupported for what the backbone and its pyramid do not do. vision: transformers.Sam3VisionConfig"""
    backbone = vision.backbone_config
    _check_type("vision_config.backbone_config", backbone, BACKBONE)
    rope = backbone.rope_parameters or {}
    if rope.get("rope_type", "axial") != "axial":
        raise Unsupported(f"rope_type={rope['rope_type']!r} of the backbone is not supported, only 'axial'")
    _check_layer(backbone)
    if backbone.hidden_size // backbone.num_attention_heads % 4:
        raise Unsupported(
            "the heads of the backbone are no multiple of 4 channels, which axial positions need"
        )
    for name in ("image_size", "patch_size", "pretrain_image_size", "window_size"):
        size_of(backbone, name)
    if vision.fpn_hidden_size % 8:
        raise Unsupported(f"vision_config.fpn_hidden_size={vision.fpn_hidden_size} is no multiple of 8")
    scales = vision.scale_factors
    if len(scales) < 2 or any(scale not in (4.0, 2.0, 1.0, 0.5) for scale in scales):
        raise Unsupported(
            f"vision_config.scale_factors={scales} are not two or more of 4.0, 2.0, 1.0 and 0.5"
        )


def _check(config: Any) -> None:
    """Raise Unsupported for what this model does not do."""
    vision = config.vision_config
    check_backbone(vision)
    _check_type("text_config", config.text_config, TEXT)
    for own in (config.text_config, *(getattr(config, name) for name in WIDTHS)):
        _check_layer(own)
    width, scales = vision.fpn_hidden_size, vision.scale_factors
    for name in WIDTHS:
        if getattr(config, name).hidden_size != width:
            raise Unsupported(
                f"config.{name}.hidden_size={getattr(config, name).hidden_size} is not"
                f" vision_config.fpn_hidden_size={width}"
            )
    if config.mask_decoder_config.num_upsampling_stages < len(scales) - 2:
        raise Unsupported(
            f"mask_decoder_config.num_upsampling_stages={config.mask_decoder_config.num_upsampling_stages} is fewer"
            f" than the {len(scales) - 2} that vision_config.scale_factors={scales} need"
        )


def _check_type(name: str, own: Any, wanted: str) -> None:
    if own.model_type != wanted:
        raise Unsupported(f"config.{name}.model_type={own.model_type!r} is not supported, only {wanted!r}")


def _check_layer(own: Any) -> None:
    """Of a config with heads and an activation."""
    for name in ("hidden_size", "num_attention_heads"):
        size_of(own, name)
    if own.hidden_size % own.num_attention_heads:
        raise Unsupported(
            f"hidden_size={own.hidden_size} of {own.model_type} is no multiple of num_attention_heads="
            f"{own.num_attention_heads}"
        )
    act = getattr(own, "hidden_act", "relu")
    if act not in GELU and act not in ACTIVATE:
        raise Unsupported(
            f"hidden_act={act!r} of {own.model_type} is not one of {', '.join((*GELU, *ACTIVATE))}"
        )


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


class Weight(nn.Module):
    """A parameter called `weight`: of an embedding, or a linear layer without bias."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = _empty(*shape)


class Mlp(nn.Module):
    """Two linear layers; the residual is added."""

    ops = ("linear_gelu", "linear_residual")

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.fc1, self.fc2 = cnn.Classifier(width, inner), cnn.Classifier(inner, width)

    def forward(self, x: T, residual: T) -> T:
        first, second = self.fc1, self.fc2
        if self.activation in GELU:
            wide = linear_gelu(x, first.weight, first.bias, GELU[self.activation])
        else:
            wide = ACTIVATE[self.activation](first(x))
        return linear_residual(residual, wide, second.weight, second.bias)


class Head(nn.Module):
    """Linear layers with ReLU between them, called layer1, layer2, ..."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.count = len(sizes) - 1
        for i in range(self.count):
            self.add_module(f"layer{i + 1}", cnn.Classifier(sizes[i], sizes[i + 1]))

    def forward(self, x: T) -> T:
        for i in range(self.count):
            x = self.get_submodule(f"layer{i + 1}")(F.relu_(x) if i else x)
        return x


class ViTAttention(nn.Module):
    """Attention among the tokens of each row x [B, S, C], with their rotations; the residual is added."""

    ops = ("rope_nd", "attention_dense", "linear_residual")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o_proj = cnn.Stacked(width, (width,) * 3), cnn.Classifier(width, width)

    def mix(self, x: T, rotation: tuple[T, T]) -> T:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (rope_nd(t, *rotation, False) for t in (q, k))
        return attention_dense(q, k, v, q.shape[-1] ** -0.5).flatten(2)

    def forward(self, mixed: T, residual: T) -> T:
        return linear_residual(residual, mixed, self.o_proj.weight, self.o_proj.bias)


@cache  # CUDA graphs refer to the results
def window_order(side: int, window: int, device: torch.device) -> tuple[T, T]:
    """(the cells in the order of their windows, window after window; the place of each cell in that order).

    Windows that reach beyond the image have cells there, too: all of them have the number side * side.
    """
    count = -(-side // window)
    cells = torch.full((count * window,) * 2, side * side, device=device)
    cells[:side, :side] = torch.arange(side * side, device=device).view(side, side)
    order = cells.view(count, window, count, window).transpose(1, 2).flatten()
    places = torch.empty(side * side + 1, dtype=torch.int64, device=device)
    places[order] = torch.arange(len(order), device=device)
    return order, places[: side * side].contiguous()


@cache  # CUDA graphs refer to the results
def rotations(
    side: int, head: int, theta: float, step: float, order: int, device: torch.device
) -> tuple[T, T]:
    """Cosines and sines of side * side cells [cells, head], float32: of pairs of channels, by x and then by y.

    step: between neighbors; order: a window's side if the cells are in the order of windows, or 0
    """
    rates = theta ** -(torch.arange(0, head // 2, 2, dtype=torch.float64, device=device) / (head // 2))
    at = torch.arange(side, dtype=torch.float64, device=device) * step
    x, y = at.repeat(side), at.repeat_interleave(side)
    angles = torch.cat((x[:, None] * rates, y[:, None] * rates), 1).repeat_interleave(2, 1)
    if order:
        angles = angles[window_order(side, order, device)[0]]
    return angles.cos().float(), angles.sin().float()


class ViTLayer(nn.Module):
    """A layer of the backbone; window: the side of the windows that attention stays in, 0 for the whole image."""

    def __init__(self, config: Any, window: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.window = window
        self.layer_norm1, self.layer_norm2 = VllmLayerNorm(width, eps), VllmLayerNorm(width, eps)
        self.attention = ViTAttention(width, config.num_attention_heads)
        self.mlp = Mlp(width, config.intermediate_size, config.hidden_act)

    def forward(self, x: T, rotation: tuple[T, T], padding: tuple[T, T] | None = None) -> T:
        """x [B, cells, C]; padding: of window_order, where windows reach beyond the image."""
        h = self.layer_norm1(x)
        if not self.window:
            mixed = self.attention.mix(h, rotation)
        elif padding is None:
            windows = h.reshape(-1, self.window**2, h.shape[2])
            mixed = self.attention.mix(windows, rotation).view(h.shape)
        else:
            order, places = padding
            windows = F.pad(h, (0, 0, 0, 1))[:, order].reshape(-1, self.window**2, h.shape[2])
            mixed = self.attention.mix(windows, rotation).view(len(h), -1, h.shape[2])[:, places]
        x = self.attention(mixed, x)
        return self.mlp(self.layer_norm2(x), x)


class ViT(nn.Module):
    """The backbone: patches [B, cells, C * p * p] to features [B, cells, width]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, p = config.hidden_size, config.patch_size
        self.side, self.window = config.image_size // p, config.window_size
        self.learned = config.pretrain_image_size // p
        self.head = width // config.num_attention_heads
        self.theta = float((config.rope_parameters or {}).get("rope_theta", TEMPERATURE))
        self.embeddings: Any = nn.Module()
        self.embeddings.patch_embeddings = nn.Module()
        self.embeddings.patch_embeddings.projection = Weight(width, config.num_channels, p, p)
        self.embeddings.position_embeddings = _empty(1, self.learned**2, width)
        self.layer_norm = VllmLayerNorm(width, config.layer_norm_eps)
        whole = set(config.global_attn_indexes)
        self.layers = nn.ModuleList(
            ViTLayer(config, 0 if i in whole else self.window) for i in range(config.num_hidden_layers)
        )

    def positions(self) -> T:
        """Embeddings of the cells [cells, width]: those of a smaller image, side by side."""
        repeats = self.side // self.learned + 1
        own = self.embeddings.position_embeddings.view(self.learned, self.learned, -1)
        return own.repeat(repeats, repeats, 1)[: self.side, : self.side].flatten(0, 1)

    def forward(self, patches: T) -> T:
        weight = self.embeddings.patch_embeddings.projection.weight.flatten(1)
        order, places = window_order(self.side, self.window, patches.device)
        whole = self.side % self.window == 0
        positions = self.positions()
        if whole:
            patches, positions = patches[:, order], positions[order]
        x = self.layer_norm(linear(patches.to(weight.dtype), weight) + positions)
        step = self.window / self.side
        rotation = {
            0: rotations(self.side, self.head, self.theta, step, self.window if whole else 0, x.device),
            self.window: rotations(self.window, self.head, self.theta, 1.0, 0, x.device),
        }
        for layer in self.layers:
            x = layer(x, rotation[layer.window], None if whole else (order, places))
        return x[:, places] if whole else x


class Transposed(nn.Module):
    """The parameters of a transposed convolution of 2 x 2 pixels with stride 2."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = _empty(channels, out, 2, 2), _empty(out)


class Level(cnn.Folded):
    """A level of the pyramid: a change of size by `scale`, a product, and a convolution.

    No activation is between the last transposed convolution and the product: after loading, they are one product.
    """

    ops = ("conv_norm_act",)

    def __init__(self, channels: int, width: int, scale: float) -> None:
        super().__init__()
        self.scale, self.width, narrow = scale, width, channels
        layers: list[nn.Module] = []
        if scale > 1:
            layers.append(Transposed(channels, channels // 2))
            narrow = channels // 2
        if scale > 2:
            layers += [nn.Identity(), Transposed(narrow, narrow // 2)]
            narrow //= 2
        self.scale_layers = nn.ModuleList(layers)
        self.proj1: cnn.Conv | None = cnn.Conv(narrow, width, bias=True)
        self.proj2 = cnn.Conv(width, width, 3, bias=True)

    @torch.no_grad()
    def merge(self) -> None:
        """Make matrices of the transposed convolutions: rows in the order of the four pixels, then of the channels."""
        found, last = [m for m in self.scale_layers if isinstance(m, Transposed)], self.proj1
        assert last is not None and last.bias is not None
        dtype, product = last.weight.dtype, last.weight.flatten(1)
        for i, conv in enumerate(found):
            matrix, bias = conv.weight.float().permute(2, 3, 1, 0), conv.bias.float()  # [2, 2, out, channels]
            if i == len(found) - 1:
                matrix = product.float() @ matrix
                bias = product.float() @ bias + last.bias.float()
            self.add_module(
                f"up{i}", cnn.Classifier(matrix.shape[3], 4 * matrix.shape[2]).to(conv.weight.device, dtype)
            )
            made = self.get_submodule(f"up{i}")
            made.weight.copy_(matrix.flatten(0, 2))  # type: ignore[operator, union-attr]
            made.bias.copy_(bias.repeat(4))  # type: ignore[operator, union-attr]
        if found:
            self.scale_layers, self.proj1 = nn.ModuleList(), None

    def forward(self, x: T, side: int) -> T:
        """x [B, side * side, channels] to the level's [B, cells, width]."""
        if self.scale < 1:
            image = F.max_pool2d(x.unflatten(1, (side, side)).permute(0, 3, 1, 2), 2, 2)
            x, side = image.permute(0, 2, 3, 1).flatten(1, 2), image.shape[2]
        if self.proj1 is not None and len(self.scale_layers):
            raise RuntimeError("merge() must come before the first image")
        if self.scale > 2:
            up: Any = self.up0
            x = _apart(linear_gelu(x, up.weight, up.bias), side)
            side *= 2
        if self.scale > 1:
            x = _apart(self.get_submodule("up1" if self.scale > 2 else "up0")(x), side)
            side *= 2
        elif self.proj1 is not None:
            x = linear(x, self.proj1.weight.flatten(1), self.proj1.bias)
        return _rows(cnn.convolve(_image(x, side), self.proj2, None, PLAIN))


PLAIN = cnn.Style("none")


def _apart(x: T, side: int) -> T:
    """The four pixels of each cell [B, side * side, 4 * C] as cells of a larger image [B, 4 * side * side, C]."""
    return x.view(len(x), side, side, 2, 2, -1).transpose(2, 3).flatten(1, 4)


def _image(x: T, side: int) -> T:
    """Cells [B, side * side, C] as [B, C, side, side], channels last."""
    return x.unflatten(1, (side, side)).permute(0, 3, 1, 2)


def _rows(x: T) -> T:
    return x.permute(0, 2, 3, 1).flatten(1, 2)


class Neck(nn.Module):
    """The first `count` levels of the config."""

    def __init__(self, config: Any, count: int) -> None:
        super().__init__()
        self.scales = tuple(config.scale_factors[:count])
        channels = config.backbone_config.hidden_size
        self.fpn_layers = nn.ModuleList(
            Level(channels, config.fpn_hidden_size, scale) for scale in self.scales
        )


class TextLayer(nn.Module):
    """A layer of CLIP's text model, with attention to the tokens before."""

    ops = ("attention_dense", "linear_residual")

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.layer_norm1, self.layer_norm2 = (VllmLayerNorm(width, config.layer_norm_eps) for _ in range(2))
        self.self_attn = SelfAttention(width, config.num_attention_heads)
        self.mlp = Mlp(width, config.intermediate_size, config.hidden_act)

    def forward(self, x: T, causal: T) -> T:
        h = self.layer_norm1(x)
        x = self.self_attn(h, None, x, causal)
        return self.mlp(self.layer_norm2(x), x)


class TextModel(nn.Module):
    """CLIP's text model: token ids [B, L] to hidden states [B, L, width]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.embeddings: Any = nn.Module()
        self.embeddings.token_embedding = Weight(config.vocab_size, width)
        self.embeddings.position_embedding = Weight(config.max_position_embeddings, width)
        self.encoder: Any = nn.Module()
        self.encoder.layers = nn.ModuleList(TextLayer(config) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)

    def forward(self, input_ids: T) -> T:
        length = input_ids.shape[1]
        x = F.embedding(input_ids, self.embeddings.token_embedding.weight)
        x = x + self.embeddings.position_embedding.weight[:length]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, None]
        for layer in self.encoder.layers:
            x = layer(x, causal)
        return self.final_layer_norm(x)


class SelfAttention(nn.Module):
    """Attention among rows x [B, S, C]; places [1 or B, S, C] are added for queries and keys. The residual is added."""

    ops = ("attention_dense", "linear_residual")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qk_proj, self.v_proj = cnn.Stacked(width, (width, width)), cnn.Classifier(width, width)
        self.o_proj = cnn.Classifier(width, width)

    def forward(self, x: T, places: T | None, residual: T, mask: T | None = None) -> T:
        q, k = self.qk_proj(x if places is None else x + places).split(self.width, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, self.v_proj(x)))
        mixed = attention_dense(q, k, v, q.shape[-1] ** -0.5, mask).flatten(2)
        return linear_residual(residual, mixed, self.o_proj.weight, self.o_proj.bias)


class CrossAttention(nn.Module):
    """Attention of rows x [B, S, C] to others; the residual is added."""

    ops = ("attention_dense", "linear_residual")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (cnn.Classifier(width, width) for _ in range(4))

    def project(self, x: T, keys: T, values: T) -> tuple[T, T, T]:
        """Queries, keys and values [B, S, heads, D]."""
        projected = self.q_proj(x), self.k_proj(keys), self.v_proj(values)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in projected)
        return q, k, v

    def finish(self, mixed: T, residual: T) -> T:
        return linear_residual(residual, mixed.flatten(2), self.o_proj.weight, self.o_proj.bias)

    def forward(self, x: T, keys: T, values: T, residual: T, mask: T | None = None) -> T:
        q, k, v = self.project(x, keys, values)
        return self.finish(attention_dense(q, k, v, q.shape[-1] ** -0.5, mask), residual)


class EncoderLayer(nn.Module):
    """Attention among rows and to others, and an MLP, each behind a norm: of the encoder and of the boxes' encoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.layer_norm1, self.layer_norm2, self.layer_norm3 = (VllmLayerNorm(width, EPS) for _ in range(3))
        self.self_attn, self.cross_attn = SelfAttention(width, heads), CrossAttention(width, heads)
        self.mlp = Mlp(width, config.intermediate_size, config.hidden_act)

    def forward(
        self, x: T, places: T | None, keys: T, values: T, own: T | None = None, others: T | None = None
    ) -> T:
        """own, others: masks of the two attentions [B, 1, 1, keys] bool, or None."""
        x = self.self_attn(self.layer_norm1(x), places, x, own)
        x = self.cross_attn(self.layer_norm2(x), keys, values, x, others)
        return self.mlp(self.layer_norm3(x), x)


def _rates(count: int, device: torch.device) -> T:
    """Factors of positions for `count` channels [count / 2]: neighbors share one."""
    return (
        2 * math.pi * TEMPERATURE ** -(torch.arange(0, count, 2, dtype=torch.float64, device=device) / count)
    )


def _waves(at: T, count: int) -> T:
    """Encodings [..., count] of numbers from 0 to 1: sines and cosines in turn, float32."""
    angles = at.double()[..., None] * _rates(count, at.device)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).float()


@cache  # CUDA graphs refer to the results
def encodings(side: int, width: int, device: torch.device, dtype: torch.dtype) -> T:
    """Encodings of the cells of a level [1, side * side, width]: of y, then of x."""
    waves = _waves(torch.arange(1, side + 1, device=device) / (side + 1e-6), width // 2)
    return torch.cat((waves.repeat_interleave(side, 0), waves.repeat(side, 1)), 1)[None].to(dtype)


def corners(boxes: T) -> T:
    """Center and size [..., 4] to left, top, right and bottom."""
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat((center - half, center + half), -1)


class GeometryEncoder(nn.Module):
    """Example boxes of a prompt to tokens [B, 1 + N, C]; the first one is learned."""

    ops = ("roi_align",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.size = config.hidden_size, config.roi_size
        self.label_embed, self.cls_embed = Weight(2, width), Weight(1, width)
        self.boxes_direct_project = cnn.Classifier(4, width)
        self.boxes_pool_project = cnn.Conv(width, width, self.size, bias=True)
        self.boxes_pos_enc_project = cnn.Classifier(width + 2, width)
        self.vision_layer_norm, self.prompt_layer_norm, self.output_layer_norm = (
            VllmLayerNorm(width, EPS) for _ in range(3)
        )
        self.final_proj = cnn.Classifier(width, width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def forward(self, boxes: T, labels: T, cells: T, places: T, side: int) -> tuple[T, T]:
        """cells [B, side * side, C]. Returns the tokens and which of them count [B, 1 + N] bool."""
        dtype, width = cells.dtype, cells.shape[2]
        pooled = roi_align(
            self.vision_layer_norm(cells).unflatten(1, (side, side)), corners(boxes) * side, self.size
        )
        weight = self.boxes_pool_project.weight.permute(0, 2, 3, 1).flatten(1)
        x, y, w, h = boxes.unbind(-1)
        waves = torch.cat((_waves(y, width // 2), _waves(x, width // 2), h[..., None], w[..., None]), -1)
        found = linear(pooled.flatten(2), weight, self.boxes_pool_project.bias)
        found = (
            found + self.boxes_direct_project(boxes.to(dtype)) + self.boxes_pos_enc_project(waves.to(dtype))
        )
        found = found + F.embedding(labels.clamp(min=0), self.label_embed.weight)
        first = self.cls_embed.weight[None].expand(len(found), -1, -1)
        tokens = self.prompt_layer_norm(self.final_proj(torch.cat((first, found), 1)))
        known = F.pad(labels != NO_BOX, (1, 0), value=True)
        keys = cells + places
        for layer in self.layers:
            tokens = layer(tokens, None, keys, cells, known[:, None, None])
        return self.output_layer_norm(tokens), known & known[:, 1:].any(1, keepdim=True)


class DecoderLayer(nn.Module):
    """Attention among the queries, to the prompt and to the image, and an MLP, each before a norm."""

    ops = ("grid_bias_attention",)
    self_attn_layer_norm: Any
    text_cross_attn_layer_norm: Any
    vision_cross_attn_layer_norm: Any
    mlp_layer_norm: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.self_attn = SelfAttention(width, heads)
        self.text_cross_attn, self.vision_cross_attn = (CrossAttention(width, heads) for _ in range(2))
        for name in ("self_attn", "text_cross_attn", "vision_cross_attn", "mlp"):
            self.add_module(f"{name}_layer_norm", VllmLayerNorm(width, EPS))
        self.mlp = Mlp(width, config.intermediate_size, config.hidden_act)

    def forward(self, x: T, places: T, prompt: T, mask: T, keys: T, cells: T, biases: tuple[T, T]) -> T:
        """x, places: [B, 1 + Q, C]; prompt: [B, L, C]; keys, cells: [B, cells, C]; biases: by row, by column."""
        x = self.self_attn_layer_norm(self.self_attn(x, places, x))
        x = self.text_cross_attn_layer_norm(self.text_cross_attn(x + places, prompt, prompt, x, mask))
        q, k, v = self.vision_cross_attn.project(x + places, keys, cells)
        mixed = grid_bias_attention(q, k, v, *biases, q.shape[-1] ** -0.5)
        x = self.vision_cross_attn_layer_norm(self.vision_cross_attn.finish(mixed, x))
        return self.mlp_layer_norm(self.mlp(x, x))


class Decoder(nn.Module):
    """Layers that refine the queries and their boxes, with a token in front that says whether there is any object."""

    ops = ("box_position_bias", "refine_boxes")

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.output_layer_norm, self.presence_layer_norm = (VllmLayerNorm(width, EPS) for _ in range(2))
        self.box_head, self.presence_head = Head(width, width, width, 4), Head(width, width, width, 1)
        self.ref_point_head = Head(2 * width, width, width)
        self.query_embed, self.reference_points = (
            Weight(config.num_queries, width),
            Weight(config.num_queries, 4),
        )
        self.presence_token = Weight(1, width)
        self.box_rpb_embed_x, self.box_rpb_embed_y = Head(2, width, heads), Head(2, width, heads)

    def _bias(self, boxes: T, side: int, vertical: bool) -> T:
        head: Any = self.box_rpb_embed_y if vertical else self.box_rpb_embed_x
        first, second = head.layer1, head.layer2
        return box_position_bias(boxes, first.weight, first.bias, second.weight, second.bias, side, vertical)

    def forward(self, cells: T, places: T, prompt: T, mask: T, side: int) -> tuple[T, T, T]:
        """Returns the queries [B, Q, C], their boxes [B, Q, 4] float32 and the logit of presence [B, 1]."""
        batch, width, dtype = len(cells), cells.shape[2], cells.dtype
        x = torch.cat((self.presence_token.weight, self.query_embed.weight))[None].repeat(batch, 1, 1)
        boxes = self.reference_points.weight.float().sigmoid()[None].repeat(batch, 1, 1)
        keys = cells + places
        for layer in self.layers:
            center_x, center_y, wide, high = boxes.unbind(-1)
            waves = _waves(torch.stack((center_y, center_x, wide, high), -1), width // 2).flatten(2)
            at = F.pad(self.ref_point_head(waves.to(dtype)), (0, 0, 1, 0))
            biases = self._bias(boxes, side, True), self._bias(boxes, side, False)
            x = layer(x, at, prompt, mask, keys, cells, biases)
            queries = self.output_layer_norm(x[:, 1:])
            boxes = refine_boxes(boxes, self.box_head(queries), LOGIT_EPS)
        presence = self.presence_head(self.presence_layer_norm(x[:, :1])).flatten(1)
        return queries, boxes, presence.float().clamp(-MOST_PRESENCE, MOST_PRESENCE)


class Scoring(nn.Module):
    """Logits of queries: products with the mean of the prompt's tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.text_mlp, self.text_mlp_out_norm = (
            Head(width, config.intermediate_size, width),
            VllmLayerNorm(width, EPS),
        )
        self.text_proj, self.query_proj = cnn.Classifier(width, width), cnn.Classifier(width, width)

    def forward(self, queries: T, prompt: T, known: T) -> T:
        """queries [B, Q, C]; prompt [B, L, C]; known [B, L] bool. Returns [B, Q] float32."""
        tokens = self.text_mlp_out_norm(self.text_mlp(prompt) + prompt)
        counted = known.float()[..., None]
        mean = (tokens.float() * counted).sum(1) / counted.sum(1).clamp(min=1)
        text = self.text_proj(mean.to(tokens.dtype)).float()
        products = (self.query_proj(queries).float() * text[:, None]).sum(-1)
        return (products * queries.shape[-1] ** -0.5).clamp(-MOST_LOGIT, MOST_LOGIT)


class MaskEmbedder(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cnn.Classifier(width, width) for _ in range(3))

    def forward(self, x: T) -> T:
        for i, layer in enumerate(self.layers):
            x = layer(F.relu_(x) if i else x)
        return x


class GroupNorm(nn.Module):
    """Parameters of a group norm."""

    ops = ("group_norm",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = _empty(width), _empty(width)


class MaskDecoder(nn.Module):
    """Masks: products of queries and pixels."""

    ops = ("conv_norm_act", "batched_matmul")

    def __init__(self, config: Any, levels: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.pixel_decoder: Any = nn.Module()
        self.pixel_decoder.conv_layers = nn.ModuleList(
            cnn.Conv(width, width, 3, bias=True) for _ in range(levels - 1)
        )
        self.pixel_decoder.norms = nn.ModuleList(GroupNorm(width) for _ in range(levels - 1))
        self.mask_embedder = MaskEmbedder(width)
        self.instance_projection = cnn.Conv(width, width, bias=True)
        self.semantic_projection = cnn.Conv(width, 1, bias=True)
        self.prompt_cross_attn = CrossAttention(width, config.num_attention_heads)
        self.prompt_cross_attn_norm = VllmLayerNorm(width, EPS)

    def forward(
        self, queries: T, levels: list[T], sides: list[int], cells: T, prompt: T, mask: T
    ) -> tuple[T, T]:
        """levels: the finer ones [B, cells, C], the finest first; cells: what the encoder made of the coarsest.

        Returns masks [B, Q, h, w] and the semantic one [B, h, w].
        """
        cells = self.prompt_cross_attn(self.prompt_cross_attn_norm(cells), prompt, prompt, cells, mask)
        made = _image(cells, sides[-1])
        pixel = self.pixel_decoder
        for level, side, conv, norm in zip(
            reversed(levels), reversed(sides[:-1]), pixel.conv_layers, pixel.norms, strict=True
        ):
            made = F.interpolate(made, size=(side, side), mode="nearest") + _image(level, side)
            made = cnn.convolve(made, conv, None, PLAIN)
            made = F.relu_(group_norm(made, GROUPS, norm.weight, norm.bias, EPS))
        # The projections of the pixels move to the queries, which are far fewer.
        embedded = self.mask_embedder(queries)
        instance, semantic = self.instance_projection, self.semantic_projection
        rows = linear(embedded, instance.weight.flatten(1).t().contiguous())
        rows = torch.cat((rows, semantic.weight.flatten(1)[None].expand(len(rows), -1, -1)), 1)
        shift = torch.cat((embedded @ instance.bias, semantic.bias[None].expand(len(rows), -1)), 1)  # type: ignore
        products = batched_matmul(rows, made.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2))
        found = products.add_(shift[:, :, None]).unflatten(2, made.shape[2:])
        return found[:, :-1], found[:, -1]


class Sam3Model(Segmenter):
    """config: transformers.Sam3Config. Raises Unsupported."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        vision, text = config.vision_config, config.text_config
        backbone, width = vision.backbone_config, vision.fpn_hidden_size
        self.side, self.patch_size = backbone.image_size // backbone.patch_size, backbone.patch_size
        self.text_length, self.vocab_size = text.max_position_embeddings, text.vocab_size
        self.vision_encoder: Any = nn.Module()
        self.vision_encoder.backbone, self.vision_encoder.neck = (
            ViT(backbone),
            Neck(vision, len(vision.scale_factors) - 1),
        )
        self.sides = [int(self.side * scale) for scale in self.vision_encoder.neck.scales]
        self.text_encoder: Any = nn.Module()
        self.text_encoder.text_model = TextModel(text)
        self.text_projection = cnn.Classifier(text.hidden_size, width)
        self.geometry_encoder = GeometryEncoder(config.geometry_encoder_config)
        self.detr_encoder: Any = nn.Module()
        encoder = config.detr_encoder_config
        self.detr_encoder.layers = nn.ModuleList(EncoderLayer(encoder) for _ in range(encoder.num_layers))
        self.detr_decoder = Decoder(config.detr_decoder_config)
        self.dot_product_scoring = Scoring(config.detr_decoder_config)
        self.mask_decoder = MaskDecoder(config.mask_decoder_config, len(self.sides))

    @property
    def dtype(self) -> torch.dtype:
        return self.text_projection.weight.dtype

    def see(self, patches: T) -> T:
        vision = self.vision_encoder
        x = vision.backbone(patches)
        return torch.cat([level(x, self.side) for level in vision.neck.fpn_layers], 1)

    def read(self, input_ids: T) -> T:
        return self.text_projection(self.text_encoder.text_model(input_ids))

    def segment(
        self, features: T, texts: T, known: T, boxes: T | None = None, labels: T | None = None
    ) -> Found:
        *levels, cells = features.split([side * side for side in self.sides], 1)
        side = self.sides[-1]
        places = encodings(side, cells.shape[2], cells.device, cells.dtype)
        prompt = texts
        if boxes is not None and labels is not None:
            tokens, counted = self.geometry_encoder(boxes, labels, cells, places, side)
            prompt, known = torch.cat((texts, tokens), 1), torch.cat((known, counted), 1)
        mask = known[:, None, None]
        for layer in self.detr_encoder.layers:
            cells = layer(cells, places, prompt, prompt, None, mask)
        queries, found, presence = self.detr_decoder(cells, places, prompt, mask, side)
        masks, semantic = self.mask_decoder(queries, levels, self.sides, cells, prompt, mask)
        return Found(
            self.dot_product_scoring(queries, prompt, known), presence, corners(found), masks, semantic
        )


def unneeded(config: Any) -> list[str]:
    """Patterns of the keys of levels and stages that the detector does not read."""
    levels = len(config.vision_config.scale_factors) - 1
    stages = range(levels - 1, config.mask_decoder_config.num_upsampling_stages)
    return [
        f"vision_encoder.neck.fpn_layers.{levels}.*",
        *(f"mask_decoder.pixel_decoder.{name}.{i}.*" for name in ("conv_layers", "norms") for i in stages),
    ]


ARCH = Architecture(
    names=("Sam3Model",),
    category="vision",
    model="Sam3Model",
    runner="Encode",
    model_type="sam3",
    inputs="images",
    packed={"qkv": ("q_of_all", "k_of_all", "v_of_all"), "qk_proj": ("q_of_self", "k_of_self")},
    parts={
        "attention.q_proj": "attention.q_of_all",
        "attention.k_proj": "attention.k_of_all",
        "attention.v_proj": "attention.v_of_all",
        "self_attn.q_proj": "self_attn.q_of_self",
        "self_attn.k_proj": "self_attn.k_of_self",
        "self_attn.out_proj": "self_attn.o_proj",
    },
    unneeded="fastkernels.models.vision.sam3:unneeded",
    unused=("text_encoder.text_projection.weight", "*.position_ids"),
)
