"""Tiny detectors with random weights, and YOLOv10 by its equations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from fastkernels.models.common.configs import ultralytics_config
from fastkernels.models.common.plans import build

T = torch.Tensor
NAMES = ["cat", "dog", "bird", "fish"]


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    """Large spots of random colors."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (3, 2, 3), dtype=np.uint8)).resize(size) for size in sizes]


@torch.no_grad()
def randomize(tensors: dict[str, T]) -> None:
    """Weights that keep the scale of activations, and norms with statistics."""
    for name, t in tensors.items():
        if name.endswith("running_var"):
            t.uniform_(0.5, 1.5)
        elif t.is_floating_point() and t.dim() < 2:
            t.normal_(float(name.endswith("weight")), 0.2)
        elif t.is_floating_point():
            t.normal_(0.0, t[0].numel() ** -0.5)


def make_rtdetr(folder: Path, kind: str = "basic", **more: Any) -> Any:
    """transformers' model, saved with an image processor for 64 x 96 pixels."""
    import transformers

    torch.manual_seed(0)
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 24, 32, 48], depths=[1, 2, 1, 1], layer_type=kind,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    fields = {
        "encoder_in_channels": [24, 32, 48], "encoder_hidden_dim": 32, "d_model": 32, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 48, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
        "num_queries": 20, "decoder_in_channels": [32, 32, 32], "num_labels": 4, **more,
    }  # fmt: skip
    labels = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    config = transformers.RTDetrV2Config(backbone_config=backbone, **labels, **fields)
    model = transformers.RTDetrV2ForObjectDetection(config).eval()
    randomize({k: t for k, t in model.state_dict().items() if not k.endswith("n_points_scale")})
    model.save_pretrained(folder)
    transformers.RTDetrImageProcessor(size={"height": 64, "width": 96}).save_pretrained(folder)
    return model


def make_yolo(folder: Path, scale: str = "n", prefix: str = "") -> dict[str, T]:
    """The state dict that is saved, by ultralytics' names, for images of at most 64 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model": f"yolov10{scale}.yaml", "task": "detect", "names": dict(enumerate(NAMES)), "imgsz": 64}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {"x.bn.weight": torch.zeros(1)}, folder / "model.safetensors"
    )  # the keys say that nothing is fused
    config = ultralytics_config.read(folder)
    blank = build.skeleton(folder, config, torch.float32)
    torch.manual_seed(0)
    state = {name: torch.empty(p.shape) for name, p in blank.named_parameters()}
    randomize(state)
    for name, t in state.items():
        if ".one2one_cv2." in name and name.endswith(".2.bias"):  # short distances: boxes inside of the image
            t -= torch.arange(16.0).repeat(4)
    save_file({f"{prefix}{name}": t for name, t in state.items()}, folder / "model.safetensors")
    return state


class Yolo:
    """YOLOv10 of a state dict with its norms: what blocks there are follows from the keys."""

    def __init__(self, state: dict[str, T]) -> None:
        self.state = state

    def has(self, name: str) -> bool:
        return any(key.startswith(f"{name}.") for key in self.state)

    def conv(self, name: str, x: T, stride: int = 1, act: bool = True) -> T:
        weight = self.state[f"{name}.conv.weight"]
        y = F.conv2d(x, weight, None, stride, weight.shape[2] // 2, 1, x.shape[1] // weight.shape[1])
        norm = [self.state[f"{name}.bn.{key}"] for key in ("running_mean", "running_var", "weight", "bias")]
        y = F.batch_norm(y, *norm, eps=1e-3)
        return F.silu(y) if act else y

    def block(self, name: str, x: T, skip: bool) -> T:
        if self.has(f"{name}.cv2"):
            y = self.conv(f"{name}.cv2", self.conv(f"{name}.cv1", x))
            return x + y if skip else y
        y = self.conv(f"{name}.cv1.1", self.conv(f"{name}.cv1.0", x))
        middle = f"{name}.cv1.2"
        if self.has(f"{middle}.conv1"):
            y = F.silu(self.conv(f"{middle}.conv", y, act=False) + self.conv(f"{middle}.conv1", y, act=False))
        else:
            y = self.conv(middle, y)
        return x + self.conv(f"{name}.cv1.4", self.conv(f"{name}.cv1.3", y))

    def c2f(self, i: int, x: T) -> T:
        kept = list(self.conv(f"model.{i}.cv1", x).chunk(2, 1))
        while self.has(f"model.{i}.m.{len(kept) - 2}"):
            kept.append(self.block(f"model.{i}.m.{len(kept) - 2}", kept[-1], i < 10))
        return self.conv(f"model.{i}.cv2", torch.cat(kept, 1))

    def down(self, i: int, x: T) -> T:
        return self.conv(f"model.{i}.cv2", self.conv(f"model.{i}.cv1", x), 2, act=False)

    def pyramid(self, x: T) -> T:
        kept = [self.conv("model.9.cv1", x)]
        for window in (5, 9, 13):
            kept.append(F.max_pool2d(kept[0], window, 1, window // 2))
        return self.conv("model.9.cv2", torch.cat(kept, 1))

    def attention(self, x: T) -> T:
        first, y = self.conv("model.10.cv1", x).chunk(2, 1)
        heads, (rows, columns) = y.shape[1] // 64, y.shape[2:]
        qkv = self.conv("model.10.attn.qkv", y, act=False).unflatten(1, (heads, -1)).flatten(3)
        wide = y.shape[1] // heads  # of a head; queries and keys have half as many
        q, k, v = qkv.split((wide // 2, wide // 2, wide), 2)
        mixed = (v @ (q.transpose(2, 3) @ k / math.sqrt(wide // 2)).softmax(-1).transpose(2, 3)).flatten(1, 2)
        mixed, v = (t.unflatten(2, (rows, columns)) for t in (mixed, v.flatten(1, 2)))
        y = y + self.conv(
            "model.10.attn.proj", mixed + self.conv("model.10.attn.pe", v, act=False), act=False
        )
        y = y + self.conv("model.10.ffn.1", self.conv("model.10.ffn.0", y), act=False)
        return self.conv("model.10.cv2", torch.cat((first, y), 1))

    def head(self, name: str, x: T) -> T:
        for i in (0, 1):
            parts = [f"{name}.{i}.{j}" for j in (0, 1)] if self.has(f"{name}.{i}.0") else [f"{name}.{i}"]
            for part in parts:
                x = self.conv(part, x)
        return F.conv2d(x, self.state[f"{name}.2.weight"], self.state[f"{name}.2.bias"]).flatten(2)

    @torch.no_grad()
    def __call__(self, x: T) -> T:
        """Images [B, 3, H, W] to rows [B, detections, 6]: left, top, right, bottom in pixels, score and label."""
        kept = {}
        for i in range(11):
            if i in (0, 1, 3):
                x = self.conv(f"model.{i}", x, 2)
            elif i in (5, 7):
                x = self.down(i, x)
            else:
                x = self.pyramid(x) if i == 9 else self.attention(x) if i == 10 else self.c2f(i, x)
            kept[i] = x
        for i, other in ((13, 6), (16, 4)):
            wide = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            kept[i] = x = self.c2f(i, torch.cat((wide, kept[other]), 1))
        levels = [x, self.c2f(19, torch.cat((self.conv("model.17", x, 2), kept[13]), 1))]
        levels.append(self.c2f(22, torch.cat((self.down(20, levels[1]), kept[10]), 1)))
        boxes, scores = [], []
        for i, (level, stride) in enumerate(zip(levels, (8, 16, 32), strict=True)):
            bins = self.head(f"model.23.one2one_cv2.{i}", level).unflatten(1, (4, 16)).softmax(2)
            left, top, right, bottom = (bins * torch.arange(16.0)[:, None]).sum(2).unbind(1)
            y, x = torch.meshgrid(*(torch.arange(n) + 0.5 for n in level.shape[2:]), indexing="ij")
            x, y = x.flatten(), y.flatten()
            boxes.append(torch.stack((x - left, y - top, x + right, y + bottom), 2) * stride)
            scores.append(self.head(f"model.23.one2one_cv3.{i}", level).sigmoid().transpose(1, 2))
        box, score = torch.cat(boxes, 1), torch.cat(scores, 1)
        count, classes = min(300, score.shape[1]), score.shape[2]
        best, at = score.flatten(1).topk(count)
        chosen = box.gather(1, (at // classes)[..., None].expand(-1, -1, 4))
        return torch.cat((chosen, best[..., None], (at % classes)[..., None]), 2)
