"""YOLOv10 (Wang et al., arXiv 2405.14458): boxes of the objects in images, without suppression of overlaps.

The interface is that of interfaces/detector.py. Parameters have the names of ultralytics' state dicts, of which the
one-to-one head is used. Boxes are computed of the best cells only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.configs.ultralytics_config import Letterbox
from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.interfaces.detector import Detector, best
from fastkernels.models.common.layers import cnn
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.detection.dfl_boxes import dfl_boxes
from fastkernels.overrides.detection.top_k_queries import top_k_queries

# {scale: (factors of depth and of width, most channels before that factor, layers of compact inverted blocks, whether
# these have a large window)}
SCALES = {
    "n": (0.33, 0.25, 1024, (22,), True),
    "s": (0.33, 0.50, 1024, (8, 22), True),
    "m": (0.67, 0.75, 768, (8, 19, 22), False),
    "b": (0.67, 1.00, 512, (8, 13, 19, 22), False),
    "l": (1.00, 1.00, 512, (8, 13, 19, 22), False),
    "x": (1.00, 1.25, 512, (6, 8, 13, 19, 22), False),
}
STRIDES, BINS, MOST = (8, 16, 32), 16, 300
HEAD = 64  # channels of an attention head
MOST_PIXELS = 8192  # of an image's side
NAME = re.compile(r"yolov10([a-z])(\.yaml|\.pt)?")
COCO = 80  # classes, by default


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config from those of a config.json: `model`, such as "yolov10n.yaml", `names`, and `imgsz`.

    names: {class: its name}; imgsz: pixels of the longer side of an image. Raises ValueError.
    """
    model, names, size = raw.get("model", "yolov10n.yaml"), raw.get("names"), raw.get("imgsz", Letterbox.size)
    found = NAME.fullmatch(str(model))
    if found is None or found[1] not in SCALES:
        known = ", ".join(f"yolov10{scale}.yaml" for scale in SCALES)
        raise ValueError(f"model={model!r} is not supported, only {known}")
    if raw.get("task", "detect") != "detect":
        raise ValueError(f"task={raw['task']!r} is not supported, only 'detect'")
    if names is None:
        names = [f"LABEL_{i}" for i in range(COCO)]
    if isinstance(names, list):
        names = dict(enumerate(names))
    if (
        not isinstance(names, dict)
        or not names
        or {str(i) for i in names} != {str(i) for i in range(len(names))}
    ):
        raise ValueError(f"names={names!r:.80} must name each class, from 0 on")
    if type(size) is not int or size % cnn.PATCH or not 0 < size <= MOST_PIXELS:
        raise ValueError(
            f"imgsz={size!r} must be a multiple of {cnn.PATCH} from {cnn.PATCH} to {MOST_PIXELS}"
        )
    labels = {int(i): str(name) for i, name in names.items()}
    return {
        "architectures": ["YOLOv10"], "model_type": "yolov10", "model": model, "scale": found[1], "names": labels,
        "id2label": labels, "imgsz": size, "fused": raw.get("fused") is True, "preprocessing": Letterbox(size),
    }  # fmt: skip


class Parts:
    """Makes the convolutions of a model. fused: the checkpoint's have no norms."""

    def __init__(self, fused: bool) -> None:
        self.style, self.fused = cnn.Style("silu", 1e-3), fused

    def conv(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True
    ) -> cnn.ConvNormAct:
        return cnn.ConvNormAct(self.style, channels, out, kernel, stride, groups, act, fused=self.fused)


class RepVggDw(cnn.AddedConvs):
    """A depthwise 7x7 and a 3x3 convolution, added."""

    def __init__(self, p: Parts, channels: int) -> None:
        branches = {
            name: p.conv(channels, channels, kernel, groups=channels, act=False)
            for name, kernel in (("conv", 7), ("conv1", 3))
        }
        super().__init__(p.style, branches)


class Bottleneck(nn.Module):
    """Two 3x3 convolutions; skip: the input is added."""

    def __init__(self, p: Parts, channels: int, skip: bool) -> None:
        super().__init__()
        self.skip, self.cv1, self.cv2 = skip, p.conv(channels, channels, 3), p.conv(channels, channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cv2(self.cv1(x), x if self.skip else None)


class CompactInvertedBlock(nn.Module):
    """Depthwise convolutions and products in turn; the input is added. large: the middle window is 7x7."""

    def __init__(self, p: Parts, channels: int, large: bool) -> None:
        super().__init__()
        wide = 2 * channels
        middle: nn.Module = p.conv(wide, wide, 3, groups=wide)
        if large:
            middle = p.conv(wide, wide, 7, groups=wide) if p.fused else RepVggDw(p, wide)
        self.cv1 = nn.Sequential(
            p.conv(channels, channels, 3, groups=channels), p.conv(channels, wide), middle, p.conv(wide, channels),
            p.conv(channels, channels, 3, groups=channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *first, last = self.cv1
        y = x
        for conv in first:
            y = conv(y)
        return last(y, x)


class C2f(nn.Module):
    """Half of the channels through a chain of blocks, each of whose results is kept."""

    def __init__(self, p: Parts, channels: int, out: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        half = out // 2
        self.cv1, self.cv2 = p.conv(channels, 2 * half), p.conv((2 + len(blocks)) * half, out)
        self.m = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first is kept whole: dense images are joined by one kernel, and halves of them by a copy each.
        kept = [self.cv1(x)]
        y = kept[0].chunk(2, 1)[1]
        for block in self.m:
            kept.append(y := block(y))
        return self.cv2(torch.cat(kept, 1))


class SCDown(nn.Module):
    """A product to other channels, then a depthwise convolution with stride 2."""

    def __init__(self, p: Parts, channels: int, out: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = p.conv(channels, out), p.conv(out, out, 3, 2, out, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cv2(self.cv1(x))


class SPPF(nn.Module):
    """Maxima of windows of 5, 9 and 13 pixels next to the values."""

    def __init__(self, p: Parts, channels: int, out: int) -> None:
        super().__init__()
        half = channels // 2
        self.cv1, self.cv2 = p.conv(channels, half), p.conv(4 * half, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.cv1(x)]
        for _ in range(3):
            kept.append(F.max_pool2d(kept[-1], 5, 1, 2))
        return self.cv2(torch.cat(kept, 1))


class Attention(nn.Module):
    """Attention among the cells x [B, C, H, W], whose keys have half a head's channels; x is added."""

    ops = ("attention_dense", "conv_norm_act")

    def __init__(self, p: Parts, channels: int) -> None:
        super().__init__()
        self.heads = channels // HEAD
        self.size = channels // self.heads
        self.keys = self.size // 2
        self.qkv = p.conv(channels, channels + 2 * self.keys * self.heads, act=False)
        self.proj = p.conv(channels, channels, act=False)
        self.pe = p.conv(channels, channels, 3, groups=channels, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2:]
        heads = self.qkv(x).flatten(2).transpose(1, 2).unflatten(2, (self.heads, -1))  # [B, H * W, heads, D]
        q, k, v = heads.split((self.keys, self.keys, self.size), -1)
        q, k = (F.pad(t, (0, self.size - self.keys)) for t in (q, k))  # zeros add nothing to the products
        mixed = attention_dense(q, k, v.contiguous(), self.keys**-0.5)
        mixed, values = (t.flatten(2).unflatten(1, (rows, columns)).permute(0, 3, 1, 2) for t in (mixed, v))
        return self.proj(self.pe(values, mixed), x)


class PSA(nn.Module):
    """Half of the channels through attention and an MLP."""

    def __init__(self, p: Parts, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.cv1, self.cv2 = p.conv(channels, channels), p.conv(channels, channels)
        self.attn = Attention(p, half)
        self.ffn = nn.Sequential(p.conv(half, 2 * half), p.conv(2 * half, half, act=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, y = self.cv1(x).chunk(2, 1)
        y = self.attn(y)
        y = self.ffn[1](self.ffn[0](y), y)
        return self.cv2(torch.cat((first, y), 1))


class Detect(nn.Module):
    """The one-to-one head: features of three levels to logits [B, cells, labels] and bins [B, cells, 4 * BINS]."""

    def __init__(self, p: Parts, channels: tuple[int, ...], labels: int) -> None:
        super().__init__()
        self.style = cnn.Style("none")
        box, label = max(16, channels[0] // 4, 4 * BINS), max(channels[0], min(labels, 100))
        self.one2one_cv2 = nn.ModuleList(
            nn.Sequential(p.conv(c, box, 3), p.conv(box, box, 3), cnn.Conv(box, 4 * BINS, bias=True))
            for c in channels
        )
        self.one2one_cv3 = nn.ModuleList(
            nn.Sequential(
                nn.Sequential(p.conv(c, c, 3, groups=c), p.conv(c, label)),
                nn.Sequential(p.conv(label, label, 3, groups=label), p.conv(label, label)),
                cnn.Conv(label, labels, bias=True),
            )
            for c in channels
        )

    def forward(self, levels: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        bins, logits = (
            torch.cat([self._last(head, x) for head, x in zip(heads, levels, strict=True)], 1)
            for heads in (self.one2one_cv2, self.one2one_cv3)
        )
        return logits, bins

    def _last(self, head: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, conv = head
        return cnn.convolve(second(first(x)), conv, None, self.style).flatten(2).transpose(1, 2)


class YOLOv10(Detector):
    """config: see `read_config`."""

    ops = ("dfl_boxes", "top_k_queries")
    channels = 3

    def __init__(self, config: Any) -> None:
        super().__init__()
        depth, width, most, inverted, large = SCALES[config.scale]
        p = Parts(config.fused)

        def wide(channels: int) -> int:
            return math.ceil(min(channels, most) * width / 8) * 8

        def chain(i: int, channels: int, out: int, repeats: int, skip: bool) -> C2f:
            out, count = wide(out), max(round(repeats * depth), 1)
            blocks: list[nn.Module] = [
                CompactInvertedBlock(p, out // 2, large) if i in inverted else Bottleneck(p, out // 2, skip)
                for _ in range(count)
            ]
            return C2f(p, channels, out, blocks)

        c1, c2, c3, c4, c5 = (wide(n) for n in (64, 128, 256, 512, 1024))
        none = nn.Identity  # layers without parameters: upsampling and concatenation
        self.model = nn.ModuleList((
            p.conv(self.channels, c1, 3, 2), p.conv(c1, c2, 3, 2), chain(2, c2, 128, 3, True), p.conv(c2, c3, 3, 2),
            chain(4, c3, 256, 6, True), SCDown(p, c3, c4), chain(6, c4, 512, 6, True), SCDown(p, c4, c5),
            chain(8, c5, 1024, 3, True), SPPF(p, c5, c5), PSA(p, c5),
            none(), none(), chain(13, c5 + c4, 512, 3, False), none(), none(), chain(16, c4 + c3, 256, 3, False),
            p.conv(c3, c3, 3, 2), none(), chain(19, c3 + c4, 512, 3, False), SCDown(p, c4, c4), none(),
            chain(22, c4 + c5, 1024, 3, False), Detect(p, (c3, c4, c5), len(config.names)),
        ))  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def detections(self, grid: tuple[int, int]) -> int:
        cells = sum((cnn.PATCH // stride) ** 2 for stride in STRIDES)
        return min(grid[0] * grid[1] * cells, MOST)

    def predict(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, cells, labels] and bins [B, cells, 4 * BINS] of images [B, C, H, W]."""
        kept: dict[int, torch.Tensor] = {}
        x = images
        for i, layer in enumerate(self.model[:11]):
            kept[i] = x = layer(x)
        for i, other in ((13, 6), (16, 4)):
            x = self.model[i](torch.cat((F.interpolate(x, scale_factor=2.0, mode="nearest"), kept[other]), 1))
            kept[i] = x
        levels = [x]
        for i, other in ((17, 13), (20, 10)):
            x = self.model[i + 2](torch.cat((self.model[i](x), kept[other]), 1))
            levels.append(x)
        return self.model[23](levels)

    def detect(self, images: torch.Tensor) -> torch.Tensor:
        logits, bins = self.predict(images)
        rows, columns = images.shape[2:]
        count = min(logits.shape[1], MOST)
        _, ids = top_k_queries(logits, count)
        shapes = [n // stride for stride in STRIDES for n in (rows, columns)]
        boxes = dfl_boxes(bins, shapes, STRIDES, ids) / _sizes(rows, columns, images.device)
        return best(logits.gather(1, ids[:, :, None].expand(-1, -1, logits.shape[2])), boxes, count)


def _sizes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Pixels of the image for each side of a box."""
    sizes = torch.full((2, 2), float(rows), device=device)
    sizes[:, 0] = float(columns)
    return sizes.flatten()


ARCH = Architecture(
    names=("YOLOv10",),
    category="vision",
    model="YOLOv10",
    runner="Encode",
    model_type="yolov10",
    own_config="fastkernels.models.vision.yolov10:read_config",
    ultralytics=("yolov10",),
    inputs="images",
    packed={},
    renamed={"model.model.": "model."},
    unused=("*.num_batches_tracked", "model.23.cv2.*", "model.23.cv3.*", "model.23.dfl.*"),
)
