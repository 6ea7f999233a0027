"""RT-DETRv2 (Lv et al., arXiv 2407.17140): boxes of the objects in images.

The interface is that of interfaces/detector.py. Convolutions have their channels last, and the two of a RepVGG block
become one. The encoder scores all cells; everything else of a query is computed for the best cells only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.detector import Detector, best
from fastkernels.models.common.layers import cnn
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.detection.deformable_attention import deformable_attention
from fastkernels.overrides.detection.refine_boxes import refine_boxes
from fastkernels.overrides.detection.top_k_queries import top_k_queries
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.vllm import VllmLayerNorm

ACTIVATIONS = {
    None: "none", "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
}  # fmt: skip
BACKBONE = "rt_detr_resnet"
ANCHOR = 0.05  # the size of an anchor of the first level, in parts of the image; each level doubles it
EDGE = 1e-2  # anchors nearer to the image's edge are left out
Shapes = tuple[int, ...]  # rows and columns of each level


def _activation(config: Any, name: str) -> str:
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        names = ", ".join(str(known) for known in ACTIVATIONS)
        raise Unsupported(f"config.{name}={value!r} is not supported, only {names}")
    return ACTIVATIONS[value]


def _check(config: Any) -> None:
    """Raise Unsupported for what this model does not do."""
    kind = getattr(getattr(config, "backbone_config", None), "model_type", None)
    if kind != BACKBONE:
        raise Unsupported(f"config.backbone_config.model_type={kind!r} is not supported, only {BACKBONE!r}")
    if config.learn_initial_query:
        raise Unsupported(
            "config.learn_initial_query=True is not supported, only queries from the image's cells"
        )
    if config.decoder_method not in ("default", "discrete"):
        raise Unsupported(f"config.decoder_method={config.decoder_method!r} is not 'default' or 'discrete'")
    levels = len(config.encoder_in_channels)
    for name in ("num_feature_levels", "decoder_n_levels"):
        if getattr(config, name) != levels:
            raise Unsupported(
                f"config.{name}={getattr(config, name)!r} is not supported, only that of encoder_in_channels, {levels}"
            )
    for name, length in (("decoder_in_channels", levels), ("feat_strides", levels)):
        if len(getattr(config, name)) != length:
            raise Unsupported(
                f"config.{name}={getattr(config, name)!r} has not {length} entries, one a level"
            )
    for width, heads in (
        ("encoder_hidden_dim", "encoder_attention_heads"),
        ("d_model", "decoder_attention_heads"),
    ):
        if size_of(config, width) % size_of(config, heads):
            raise Unsupported(f"config.{width}={getattr(config, width)} is no multiple of {heads}")
    for name in ("encoder_ffn_dim", "decoder_ffn_dim", "num_queries"):
        size_of(config, name)
    if config.encoder_hidden_dim % 4:
        raise Unsupported(f"config.encoder_hidden_dim={config.encoder_hidden_dim} is no multiple of 4")


class ResNetLayer(nn.Module):
    """Two or three convolutions and the input, which a convolution of its own may map: the activation of their sum."""

    def __init__(self, config: Any, channels: int, out: int, stride: int, first: bool) -> None:
        super().__init__()
        inner, act = cnn.Style("relu"), _activation(config, "hidden_act")
        sizes: tuple[tuple[int, int, int, int], ...]
        if config.layer_type == "bottleneck":
            narrow, early = out // 4, config.downsample_in_bottleneck
            sizes = (
                (channels, narrow, 1, stride if early else 1),
                (narrow, narrow, 3, 1 if early else stride),
                (narrow, out, 1, 1),
            )
            mapped, pooled = channels != out or stride != 1, stride == 2
        else:
            sizes = ((channels, out, 3, stride), (out, out, 3, 1))
            mapped, pooled = first, channels != out and first
        last = len(sizes) - 1
        self.layer = nn.Sequential(
            *(
                cnn.ConvNormAct(
                    cnn.Style(act) if i == last else inner, *size, names=("convolution", "normalization")
                )
                for i, size in enumerate(sizes)
            )
        )
        self.pooled, self.shortcut = pooled, None
        if mapped:
            short = cnn.ConvNormAct(
                inner,
                channels,
                out,
                1,
                1 if pooled else stride,
                act=False,
                names=("convolution", "normalization"),
            )
            self.shortcut = nn.Sequential(nn.Identity(), short) if pooled else short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = F.avg_pool2d(x, 2, 2, 0, ceil_mode=True) if self.pooled else x
        if self.shortcut is not None:
            residual = self.shortcut(residual)
        *first, last = self.layer
        for conv in first:
            x = conv(x)
        return last(x, residual, add_first=True)


class ResNet(nn.Module):
    """The backbone: images to the features of the stages that the config names, finest first."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        style = cnn.Style(_activation(config, "hidden_act"))
        width, half = config.embedding_size, config.embedding_size // 2
        names = ("convolution", "normalization")
        self.embedder: Any = nn.Module()
        self.embedder.embedder = nn.Sequential(
            cnn.ConvNormAct(style, config.num_channels, half, 3, 2, names=names),
            cnn.ConvNormAct(style, half, half, 3, names=names),
            cnn.ConvNormAct(style, half, width, 3, names=names),
        )
        self.encoder: Any = nn.Module()
        stages = []
        for i, (out, depth) in enumerate(zip(config.hidden_sizes, config.depths, strict=True)):
            stride = 2 if i or config.downsample_in_first_stage else 1
            layers = [
                ResNetLayer(config, out if j else width, out, 1 if j else stride, j == 0)
                for j in range(depth)
            ]
            stage: Any = nn.Module()
            stage.layers = nn.Sequential(*layers)
            stages.append(stage)
            width = out
        self.encoder.stages = nn.ModuleList(stages)
        self.taken = [config.stage_names.index(name) for name in config.out_features]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [F.max_pool2d(self.embedder.embedder(x), 3, 2, 1)]
        for stage in self.encoder.stages:
            found.append(stage.layers(found[-1]))
        return [found[i] for i in self.taken]


class RepVggBlock(cnn.AddedConvs):
    """A 3x3 and a 1x1 convolution, added."""

    def __init__(self, style: cnn.Style, channels: int) -> None:
        branches = {
            f"conv{i}": cnn.ConvNormAct(style, channels, channels, kernel, act=False, names=("conv", "norm"))
            for i, kernel in ((1, 3), (2, 1))
        }
        super().__init__(style, branches)


class CspRepLayer(nn.Module):
    """Two branches of the input, one of them through RepVGG blocks, added."""

    def __init__(self, style: cnn.Style, width: int, expansion: float) -> None:
        super().__init__()
        inner, names = int(width * expansion), ("conv", "norm")
        self.conv1 = cnn.ConvNormAct(style, 2 * width, inner, names=names)
        self.conv2 = cnn.ConvNormAct(style, 2 * width, inner, names=names)
        self.bottlenecks = nn.Sequential(*(RepVggBlock(style, inner) for _ in range(3)))
        self.conv3 = None if inner == width else cnn.ConvNormAct(style, inner, width, names=names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv2(x, self.bottlenecks(self.conv1(x)))
        return y if self.conv3 is None else self.conv3(y)


class SelfAttention(nn.Module):
    """Attention among rows x [B, S, C]; places [1 or B, S, C] are added for queries and keys. The residual is added."""

    ops = ("attention_dense", "linear_residual")

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qk_proj, self.v_proj = cnn.Stacked(width, (width, width)), cnn.Classifier(width, width)
        self.out_proj = cnn.Classifier(width, width)

    def forward(self, x: torch.Tensor, places: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        q, k = self.qk_proj(x if places is None else x + places).split(self.width, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, self.v_proj(x)))
        mixed = attention_dense(q, k, v, q.shape[-1] ** -0.5).flatten(2)
        return linear_residual(residual, mixed, self.out_proj.weight, self.out_proj.bias)


class FeedForward(nn.Module):
    """Two linear layers; the residual is added."""

    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.fc1, self.fc2 = cnn.Classifier(width, inner), cnn.Classifier(inner, width)

    def mlp(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        first, second = self.fc1, self.fc2
        if self.activation in ("gelu", "gelu_tanh"):
            approximate = "tanh" if self.activation == "gelu_tanh" else "none"
            wide = linear_gelu(x, first.weight, first.bias, approximate)
        else:
            wide = ACTIVATE[self.activation](first(x))
        return linear_residual(residual, wide, second.weight, second.bias)


ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": nn.Identity(),
    "relu": F.relu_,
    "silu": F.silu,
}


class EncoderLayer(FeedForward):
    """Attention among the cells of one level, and an MLP. x, places: [B, S, C]."""

    def __init__(self, config: Any) -> None:
        width = config.encoder_hidden_dim
        super().__init__(width, config.encoder_ffn_dim, _activation(config, "encoder_activation_function"))
        self.before = config.normalize_before
        self.self_attn = SelfAttention(width, config.encoder_attention_heads)
        self.self_attn_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)
        self.final_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)

    def forward(self, x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        if self.before:
            x = self.self_attn(self.self_attn_layer_norm(x), places, x)
            x = self.final_layer_norm(x)  # the residual, too, is the normalized one
            return self.mlp(x, x)
        x = self.self_attn_layer_norm(self.self_attn(x, places, x))
        return self.final_layer_norm(self.mlp(x, x))


@cache  # CUDA graphs refer to the results
def sines(
    rows: int, columns: int, width: int, temperature: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Encodings of cells [1, rows * columns, width]: sines and cosines of y, then of x."""
    quarter = width // 4
    rates = temperature ** (-torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
    y, x = (torch.arange(n, dtype=torch.float64, device=device)[:, None] * rates for n in (rows, columns))
    y, x = y.repeat_interleave(columns, 0), x.repeat(rows, 1)
    return torch.cat((y.sin(), y.cos(), x.sin(), x.cos()), 1)[None].to(dtype)


@cache  # CUDA graphs refer to the results
def anchors(shapes: Shapes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of the anchors [1, cells, 4] float32, whether each counts [1, cells, 1])."""
    found = []
    for i, (rows, columns) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        y, x = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n for n in (rows, columns))
        places = x.repeat(rows), y.repeat_interleave(columns)
        size = torch.full_like(places[0], ANCHOR * 2.0**i)
        found.append(torch.stack((*places, size, size), 1))
    boxes = torch.cat(found)[None]
    inside = ((boxes > EDGE) & (boxes < 1 - EDGE)).all(-1, keepdim=True)
    logits = torch.log(boxes / (1 - boxes)).masked_fill(~inside, torch.finfo(torch.float32).max)
    return logits, inside


class Head(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(cnn.Classifier(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self.layers
        for layer in first:
            x = F.relu_(layer(x))
        return last(x)


class HybridEncoder(nn.Module):
    """Attention within the coarsest levels, then a pyramid of convolutions down and up."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.config = config.encoder_hidden_dim, config
        style = cnn.Style(_activation(config, "activation_function"), config.batch_norm_eps)
        steps, names = len(config.encoder_in_channels) - 1, ("conv", "norm")

        def layers() -> nn.Module:
            made: Any = nn.Module()
            made.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
            return made

        self.encoder = nn.ModuleList(layers() for _ in config.encode_proj_layers)
        self.lateral_convs = nn.ModuleList(
            cnn.ConvNormAct(style, width, width, names=names) for _ in range(steps)
        )
        self.downsample_convs = nn.ModuleList(
            cnn.ConvNormAct(style, width, width, 3, 2, names=names) for _ in range(steps)
        )
        self.fpn_blocks, self.pan_blocks = (
            nn.ModuleList(CspRepLayer(style, width, config.hidden_expansion) for _ in range(steps))
            for _ in range(2)
        )

    def forward(self, levels: list[torch.Tensor]) -> list[torch.Tensor]:
        config, levels = self.config, list(levels)
        stacks: Any = self.encoder
        for i, stack in zip(config.encode_proj_layers, stacks, strict=True):
            x = levels[i]
            rows, columns = x.shape[2:]
            tokens, places = x.flatten(2).transpose(1, 2), None
            if config.eval_size is None:
                temperature = float(config.positional_encoding_temperature)
                places = sines(rows, columns, tokens.shape[2], temperature, x.device, x.dtype)
            for layer in stack.layers:
                tokens = layer(tokens, places)
            levels[i] = tokens.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
        down = [levels[-1]]
        for lateral, block, finer in zip(
            self.lateral_convs, self.fpn_blocks, reversed(levels[:-1]), strict=True
        ):
            down[-1] = lateral(down[-1])
            wide = F.interpolate(down[-1], scale_factor=2.0, mode="nearest")
            down.append(block(torch.cat((wide, finer), 1)))
        up = [down.pop()]
        for conv, block in zip(self.downsample_convs, self.pan_blocks, strict=True):
            up.append(block(torch.cat((conv(up[-1]), down.pop()), 1)))
        return up


class DeformableAttention(nn.Module):
    """Values at places around each query's box; the residual is added."""

    ops = ("deformable_attention", "linear_residual")

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.d_model, config.decoder_attention_heads
        self.points = config.decoder_n_levels * config.decoder_n_points
        self.scale, self.discrete = config.decoder_offset_scale, config.decoder_method == "discrete"
        count = self.heads * self.points
        self.sampling = cnn.Stacked(width, (2 * count, count))
        self.value_proj, self.output_proj = cnn.Classifier(width, width), cnn.Classifier(width, width)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, memory: torch.Tensor, boxes: torch.Tensor, shapes: Shapes
    ) -> torch.Tensor:
        """x, places: [B, Q, C]; memory: [B, cells, C]; boxes: [B, Q, 4] float32."""
        value = self.value_proj(memory).unflatten(-1, (self.heads, -1))
        offsets, weights = self.sampling(x + places).split(self.sampling.outs, -1)
        found = deformable_attention(
            value, offsets.unflatten(-1, (self.heads, self.points, 2)), weights.unflatten(-1, (self.heads, -1)), boxes,
            shapes, self.scale, True, self.discrete,
        )  # fmt: skip
        return linear_residual(x, found, self.output_proj.weight, self.output_proj.bias)


class DecoderLayer(FeedForward):
    """Attention among the queries, attention to the image, and an MLP."""

    def __init__(self, config: Any) -> None:
        width = config.d_model
        super().__init__(width, config.decoder_ffn_dim, _activation(config, "decoder_activation_function"))
        self.self_attn = SelfAttention(width, config.decoder_attention_heads)
        self.self_attn_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)
        self.encoder_attn = DeformableAttention(config)
        self.encoder_attn_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)
        self.final_layer_norm = VllmLayerNorm(width, config.layer_norm_eps)

    def forward(
        self, x: torch.Tensor, places: torch.Tensor, memory: torch.Tensor, boxes: torch.Tensor, shapes: Shapes
    ) -> torch.Tensor:
        x = self.self_attn_layer_norm(self.self_attn(x, places, x))
        x = self.encoder_attn_layer_norm(self.encoder_attn(x, places, memory, boxes, shapes))
        return self.final_layer_norm(self.mlp(x, x))


class Decoder(nn.Module):
    """Layers that refine the queries and their boxes."""

    ops = ("refine_boxes",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, depth = config.d_model, config.decoder_layers
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(depth))
        self.query_pos_head = Head((4, 2 * width, width))
        self.bbox_embed = nn.ModuleList(Head((width, width, width, 4)) for _ in range(depth))
        self.class_embed = nn.ModuleDict(
            {str(depth - 1): cnn.Classifier(width, config.num_labels)}
        )  # the last one's

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, boxes: torch.Tensor, shapes: Shapes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [B, Q, C]; boxes: [B, Q, 4] float32. Returns logits [B, Q, labels] and the last boxes."""
        for layer, head in zip(self.layers, self.bbox_embed, strict=True):
            x = layer(x, self.query_pos_head(boxes.to(x.dtype)), memory, boxes, shapes)
            boxes = refine_boxes(boxes, head(x))
        (classes,) = self.class_embed.values()
        return classes(x), boxes


class RTDetrV2Model(nn.Module):
    """Images [B, C, H, W] to logits [B, Q, labels] and boxes [B, Q, 4], center and size in parts of the image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, labels, self.queries = config.d_model, config.num_labels, config.num_queries
        plain = cnn.Style("none")
        self.backbone: Any = nn.Module()
        self.backbone.model = ResNet(config.backbone_config)
        self.encoder_input_proj = nn.ModuleList(
            cnn.ConvNormAct(plain, channels, config.encoder_hidden_dim, names=("0", "1"))
            for channels in config.encoder_in_channels
        )
        self.encoder = HybridEncoder(config)
        self.enc_output = nn.Sequential(
            cnn.Classifier(width, width), VllmLayerNorm(width, config.layer_norm_eps)
        )
        self.enc_score_head = cnn.Classifier(width, labels)
        self.enc_bbox_head = Head((width, width, width, 4))
        style = cnn.Style("none", config.batch_norm_eps)
        self.decoder_input_proj = nn.ModuleList(
            cnn.ConvNormAct(style, channels, width, names=("0", "1"))
            for channels in config.decoder_in_channels
        )
        self.decoder = Decoder(config)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.backbone.model(images)
        levels = self.encoder([conv(x) for conv, x in zip(self.encoder_input_proj, features, strict=True)])
        made = [conv(x) for conv, x in zip(self.decoder_input_proj, levels, strict=True)]
        shapes: Shapes = tuple(n for x in made for n in x.shape[2:])
        memory = torch.cat([x.flatten(2).transpose(1, 2) for x in made], 1)
        logits, inside = anchors(shapes, memory.device)
        cells = self.enc_output(memory * inside)
        _, ids = top_k_queries(self.enc_score_head(cells), self.queries)
        chosen = cells.gather(1, ids[:, :, None].expand(-1, -1, cells.shape[2]))
        boxes = torch.sigmoid(self.enc_bbox_head(chosen).float() + logits[0][ids])
        return self.decoder(chosen, memory, boxes, shapes)


class RTDetrV2ForObjectDetection(Detector):
    """config: transformers.RTDetrV2Config. Raises Unsupported."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check(config)
        self.channels, self.queries = config.backbone_config.num_channels, config.num_queries
        self.strides = tuple(config.feat_strides)
        self.model = RTDetrV2Model(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.enc_score_head.weight.dtype

    def detections(self, grid: tuple[int, int]) -> int:
        rows, columns = (n * cnn.PATCH for n in grid)
        cells = sum(math.ceil(rows / s) * math.ceil(columns / s) for s in self.strides)
        if cells < self.queries:
            raise ValueError(
                f"the prompt, an image of {columns} x {rows} pixels for the model, has {cells} cells, and"
                f" config.num_queries is {self.queries}"
            )
        return self.queries

    def detect(self, images: torch.Tensor) -> torch.Tensor:
        logits, boxes = self.model(images)
        ends = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
        return best(logits, torch.cat(ends, -1), self.queries)


def unneeded(config: Any) -> list[str]:
    """Patterns of the keys of heads that training uses only."""
    return [f"model.decoder.class_embed.{i}.*" for i in range(config.decoder_layers - 1)]


ARCH = Architecture(
    names=("RTDetrV2ForObjectDetection",),
    category="vision",
    model="RTDetrV2ForObjectDetection",
    runner="Encode",
    model_type="rt_detr_v2",
    inputs="images",
    sizes={"num_hidden_layers": "decoder_layers"},
    packed={"qk_proj": ("q_proj", "k_proj"), "sampling": ("sampling_offsets", "attention_weights")},
    renamed={
        "class_embed.": "model.decoder.class_embed.",
        "bbox_embed.": "model.decoder.bbox_embed.",
    },
    repeated=("model.decoder.class_embed.*", "model.decoder.bbox_embed.*"),
    parts={"o_proj": "out_proj", "mlp.fc1": "fc1", "mlp.fc2": "fc2", "encoder.aifi": "encoder.encoder"},
    unneeded="fastkernels.models.vision.rtdetrv2:unneeded",
    unused=("*.num_batches_tracked", "*.n_points_scale", "model.denoising_class_embed.weight"),
)
