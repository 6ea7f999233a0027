"""Point Transformer V3 (Wu et al., arXiv 2312.10035): classes or features of points, from Pointcept's checkpoints.

Keys are those of Pointcept's DefaultSegmentorV2, whose backbone is the class of Pointcept/PointTransformerV3 (commit
3229e9b), or of that class alone. config.json is ours, with that class's arguments under their names:

    {"architectures": ["PointTransformerV3"], "model_type": "ptv3", "dtype": "float32", "num_classes": 20,
     "in_channels": 6, "enc_depths": [2, 2, 2, 6, 2], ...}

Fields that are left out have the class's defaults. Without num_classes, the result is the features of the points. The
interface is that of models/recsys/dlrm_v2.py; a result has a row for each point.

The class permutes the orders at random in each call: in its pools, and with shuffle_orders in front of the first stage
as well. Here the permutations are those of a call after torch.manual_seed(shuffle_seed), so that the same cloud has the
same result. No result depends on the other clouds of a batch, since each has a cube of its own. Patches are those of
the class with flash attention.
"""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.samples import Place, Scores, fields, is_number
from fastkernels.models.common.layers.cnn import BatchNorm
from fastkernels.models.recsys.dlrm_v2 import positive
from fastkernels.overrides.block.linear_residual import linear_residual
from fastkernels.overrides.conv.batch_norm import batch_norm
from fastkernels.overrides.dense_attention.attention_dense import attention_dense
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_gelu import linear_gelu
from fastkernels.overrides.norm.layer_norm import layer_norm
from fastkernels.overrides.point.clouds import DEEPEST, depths_of
from fastkernels.overrides.point.segment_reduce import segment_reduce
from fastkernels.overrides.point.serialize_points import CLOUD, ORDERS, serialize_points
from fastkernels.overrides.point.subm_conv3d import subm_conv3d
from fastkernels.overrides.point.voxel_neighbors import voxel_neighbors

BATCH_EPS, LAYER_EPS = 1e-3, 1e-5
STEM = 5  # cells of the first convolution's side
CLOUDS = 4096  # of a step
FIELDS = ("coord", "feat", "grid_size")
DEFAULTS: dict[str, Any] = {
    "in_channels": 6, "num_classes": 0, "order": list(ORDERS), "stride": [2, 2, 2, 2], "enc_depths": [2, 2, 2, 6, 2],
    "enc_channels": [32, 64, 128, 256, 512], "enc_num_head": [2, 4, 8, 16, 32], "enc_patch_size": [1024] * 5,
    "dec_depths": [2, 2, 2, 2], "dec_channels": [64, 64, 128, 256], "dec_num_head": [4, 4, 8, 16],
    "dec_patch_size": [1024] * 4, "mlp_ratio": 4, "qkv_bias": True, "qk_scale": None, "pre_norm": True,
    "shuffle_orders": True, "shuffle_seed": 0, "enable_rpe": False, "cls_mode": False, "pdnorm_bn": False,
    "pdnorm_ln": False,
}  # fmt: skip
REFUSED = ("enable_rpe", "cls_mode", "pdnorm_bn", "pdnorm_ln")


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    made = {**DEFAULTS, **raw}
    positive(made, "in_channels")
    if type(made["num_classes"]) is not int or made["num_classes"] < 0:
        raise Unsupported(
            f"config.num_classes={made['num_classes']!r} is not supported, only integers from 0 on"
        )
    for name in REFUSED:
        if made[name]:
            raise Unsupported(f"config.{name}={made[name]!r} is not supported, only false")
    order = [made["order"]] if isinstance(made["order"], str) else made["order"]
    if not isinstance(order, list) or not order or any(o not in ORDERS for o in order):
        raise Unsupported(f"config.order={made['order']!r} is not a list of {', '.join(ORDERS)}")
    stages = len(made["enc_depths"]) if isinstance(made["enc_depths"], list) else 0
    for name in ("enc_depths", "enc_channels", "enc_num_head", "enc_patch_size", "stride", *_DECODER):
        least, count = 0 if name.endswith("depths") else 1, stages - (name in _DECODER or name == "stride")
        value = made[name]
        right = isinstance(value, list) and len(value) == count and stages > 0
        if not right or any(type(n) is not int or n < least for n in value):
            raise Unsupported(f"config.{name}={value!r} must be a list of {count} integers from {least} on")
    for name in ("enc", "dec"):
        for channels, heads in zip(made[f"{name}_channels"], made[f"{name}_num_head"], strict=True):
            if channels % heads:
                raise Unsupported(f"config.{name}_channels has {channels}, which {heads} heads do not divide")
    if (
        made["dec_patch_size"] != made["enc_patch_size"][:-1]
    ):  # the class would cut a stage by its first layer's size
        raise Unsupported(
            f"config.dec_patch_size={made['dec_patch_size']!r} must be enc_patch_size without its last number,"
            f" {made['enc_patch_size'][:-1]!r}"
        )
    if any(n & (n - 1) for n in made["stride"]):
        raise Unsupported(f"config.stride={made['stride']!r} must be powers of two")
    if not is_number(made["mlp_ratio"]) or made["mlp_ratio"] <= 0:
        raise Unsupported(f"config.mlp_ratio={made['mlp_ratio']!r} is not supported, only numbers above 0")
    return {**made, "order": order}


_DECODER = ("dec_depths", "dec_channels", "dec_num_head", "dec_patch_size")


@dataclass(frozen=True)
class Patches:
    """Where the points of a level go to be cut into sequences, and come from again. See Level.patches."""

    take: torch.Tensor  # [M]: points in the order of the sequences; some are in two of them
    back: torch.Tensor  # [N]: the place of each point in `take`
    ends: torch.Tensor  # [sequences + 1] int32
    longest: int


@dataclass(frozen=True)
class Level:
    """The cells of a batch of clouds at one scale, and what layers share that depends on their places only."""

    grid: torch.Tensor  # [N, 3]
    batch: torch.Tensor  # [N]
    depths: torch.Tensor  # [clouds]
    codes: torch.Tensor  # [orders, N]
    counts: tuple[int, ...]  # cells of each cloud
    order: torch.Tensor = field(init=False)
    inverse: torch.Tensor = field(init=False)
    _patches: dict[tuple[int, int], Patches] = field(default_factory=dict)
    _neighbors: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = self.codes.argsort(1)
        places = torch.arange(order.shape[1], device=order.device).expand_as(order)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "inverse", torch.empty_like(order).scatter_(1, order, places))

    def neighbors(self, side: int) -> torch.Tensor:
        """See voxel_neighbors."""
        if side not in self._neighbors:
            self._neighbors[side] = voxel_neighbors(self.grid, self.batch, side)
        return self._neighbors[side]

    def patches(self, order: int, size: int) -> Patches:
        """The clouds along one order, cut into sequences of `size`.

        The last sequence of a cloud is filled up in front of its end with points of the one before it. A cloud of at
        most `size` points is one sequence.
        """
        if (order, size) not in self._patches:
            device = self.batch.device
            counts = np.array(self.counts, np.int64)
            padded = np.where(counts > size, -(-counts // size) * size, counts)
            starts, first = np.cumsum(counts) - counts, np.cumsum(padded) - padded
            steps = [np.arange(begin, begin + n, size) for begin, n in zip(first, padded, strict=True)]
            ends = np.concatenate((*steps, [padded.sum()])).astype(np.int32)
            at = np.arange(padded.sum()) - np.repeat(first, padded)
            at = np.where(at < np.repeat(counts, padded), at, at - size) + np.repeat(starts, padded)
            moved = np.arange(counts.sum()) + np.repeat(first - starts, counts)
            at, moved, ends = (torch.from_numpy(a).to(device, non_blocking=True) for a in (at, moved, ends))  # type: ignore[assignment]
            self._patches[order, size] = Patches(
                self.order[order][at], moved[self.inverse[order]], ends, int(min(counts.max(), size))  # type: ignore[arg-type, index]
            )  # fmt: skip
        return self._patches[order, size]


@dataclass(frozen=True)
class Pool:
    """The cells of a level by the cell of the next level that they are in."""

    rows: torch.Tensor  # [N]
    offsets: torch.Tensor  # [cells of the next level + 1]
    cluster: torch.Tensor  # [N]: the next level's cell of each


def pooled(level: Level, stride: int, shuffle: Sequence[int]) -> tuple[Level, Pool]:
    """The level whose cells are `stride` times as wide, with its orders permuted. Waits for the device."""
    wanted = (stride - 1).bit_length()
    bits = torch.where(level.depths < wanted, 0, wanted)
    high, clouds = level.batch << CLOUD, len(level.counts)
    codes = (level.codes ^ high) >> 3 * bits[level.batch] | high
    rows = level.order[0]
    _, at, sizes = torch.unique_consecutive(codes[0][rows], return_inverse=True, return_counts=True)
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    heads = rows[offsets[:-1]]
    batch = level.batch[heads]
    made = Level(
        level.grid[heads] >> bits[batch][:, None], batch, level.depths - bits,
        torch.stack([codes[i][heads] for i in shuffle]), tuple(torch.bincount(batch, minlength=clouds).tolist()),
    )  # fmt: skip
    return made, Pool(rows, offsets, torch.empty_like(at).scatter_(0, rows, at))


class Convolution(nn.Module):
    """spconv's SubMConv3d: x [N, I] and the neighbors of all cells to [N, O]."""

    ops = ("subm_conv3d",)

    def __init__(self, inner: int, outer: int, side: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, side, side, side, inner))
        self.bias = nn.Parameter(torch.empty(outer)) if bias else None

    def forward(self, x: torch.Tensor, neighbors: torch.Tensor) -> torch.Tensor:
        return subm_conv3d(x, self.weight, neighbors, self.bias)


class Linear(nn.Linear):
    ops = ("linear",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    ops = ("layer_norm",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, LAYER_EPS)


class NormGelu(BatchNorm):
    """gelu(batch_norm(x)), x [N, C]."""

    ops = ("batch_norm",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, BATCH_EPS, "gelu")


class SerializedAttention(nn.Module):
    """Attention within patches of a level's points along a curve: x [N, C], added to the residual."""

    ops = ("attention_dense", "linear", "linear_residual")

    def __init__(self, channels: int, heads: int, patch: int, order: int, config: Any) -> None:
        super().__init__()
        self.heads, self.patch, self.order = heads, patch, order
        self.scale: float = config.qk_scale or (channels // heads) ** -0.5
        self.qkv = nn.Linear(channels, 3 * channels, bias=config.qkv_bias)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, level: Level) -> torch.Tensor:
        patches = level.patches(self.order, self.patch)
        qkv = linear(x, self.qkv.weight, self.qkv.bias)[patches.take]
        q, k, v = qkv.view(1, len(qkv), 3, self.heads, -1).unbind(2)
        ends, longest = patches.ends, patches.longest
        found = attention_dense(q, k, v, self.scale, None, ends, ends, longest, longest)
        return linear_residual(residual, found.flatten(2)[0][patches.back], self.proj.weight, self.proj.bias)


class MLP(nn.Module):
    """x [N, C], added to the residual."""

    ops = ("linear_gelu", "linear_residual")

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(channels, inner), nn.Linear(inner, channels)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        wide = linear_gelu(x, self.fc1.weight, self.fc1.bias, "none")
        return linear_residual(residual, wide, self.fc2.weight, self.fc2.bias)


class Block(nn.Module):
    """A convolution that encodes positions, attention and an MLP: x [N, C] to the same.

    seen: what the convolution reads, if not x
    """

    def __init__(self, channels: int, heads: int, patch: int, order: int, config: Any) -> None:
        super().__init__()
        self.pre_norm: bool = config.pre_norm
        self.cpe = nn.ModuleList(
            [Convolution(channels, channels, 3, True), Linear(channels, channels), LayerNorm(channels)]
        )
        self.norm1, self.norm2 = (nn.ModuleList([LayerNorm(channels)]) for _ in range(2))
        self.attn = SerializedAttention(channels, heads, patch, order, config)
        self.mlp = nn.ModuleList([MLP(channels, int(channels * config.mlp_ratio))])

    def forward(self, x: torch.Tensor, level: Level, seen: torch.Tensor | None = None) -> torch.Tensor:
        conv, mix, norm = self.cpe
        x = x + norm(mix(conv(x if seen is None else seen, level.neighbors(3))))
        (norm1,), (norm2,), (mlp,) = self.norm1, self.norm2, self.mlp
        if self.pre_norm:
            x = self.attn(norm1(x), x, level)
            return mlp(norm2(x), x)
        x = norm1(self.attn(x, x, level))
        return norm2(mlp(x, x))


class Down(nn.Module):
    """The largest values of the points of each wider cell."""

    ops = ("segment_reduce",)

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.proj = Linear(inner, outer)
        self.norm = nn.ModuleList([NormGelu(outer)])

    def forward(self, x: torch.Tensor, pool: Pool) -> torch.Tensor:
        return self.norm[0](segment_reduce(self.proj(x), pool.offsets, pool.rows, "max"))


class Up(nn.Module):
    """Each point gets the features of its wider cell. Returns the sum with its own, and those alone."""

    def __init__(self, inner: int, skip: int, outer: int) -> None:
        super().__init__()
        self.proj = nn.ModuleList([Linear(inner, outer), NormGelu(outer)])
        self.proj_skip = nn.ModuleList([Linear(skip, outer), NormGelu(outer)])

    def forward(self, x: torch.Tensor, skip: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.proj:
            x = layer(x)
        for layer in self.proj_skip:
            skip = layer(skip)
        return skip + x[pool.cluster], skip


class Stem(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        channels = config.enc_channels[0]
        self.conv = Convolution(config.in_channels, channels, STEM, False)
        self.norm = NormGelu(channels)


class Embedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.stem = Stem(config)

    def forward(self, x: torch.Tensor, level: Level) -> torch.Tensor:
        return self.stem.norm(self.stem.conv(x, level.neighbors(STEM)))


@dataclass(frozen=True)
class Sample:
    """A cloud: its cells [V, 3] int32, their first points' features [V, C] float32, and the cell of each point [N]."""

    grid: np.ndarray
    feat: np.ndarray
    cell: np.ndarray

    @property
    def size(self) -> int:
        return len(self.cell)


class PointTransformerV3(nn.Module):
    """config: the fields of read_config."""

    ops = ("serialize_points", "voxel_neighbors")

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.in_channels: int = config.in_channels
        self.stride, stages = config.stride, len(config.enc_depths)
        self.rows = [ORDERS.index(order) for order in config.order]
        generator = torch.Generator().manual_seed(config.shuffle_seed)
        draw = partial(torch.randperm, len(self.rows), generator=generator, device="cpu")
        # The class's pools always permute the orders
        self.shuffles = [draw().tolist() if config.shuffle_orders else list(range(len(self.rows)))]
        self.shuffles += [draw().tolist() for _ in range(stages - 1)]
        self.embedding = Embedding(config)
        self.enc, self.dec = nn.ModuleDict(), nn.ModuleDict()
        channels = config.enc_channels
        for s in range(stages):
            stage = nn.ModuleDict({"down": Down(channels[s - 1], channels[s])} if s else {})
            stage.update(self._blocks(config, "enc", s))
            if len(stage):
                self.enc[f"enc{s}"] = stage
        wide = [*config.dec_channels, channels[-1]]
        for s in reversed(range(stages - 1)):
            up = Up(wide[s + 1], channels[s], wide[s])
            self.dec[f"dec{s}"] = nn.ModuleDict({"up": up, **self._blocks(config, "dec", s)})
        self.seg_head = Linear(wide[0], config.num_classes) if config.num_classes else None

    def _blocks(self, config: Any, side: str, s: int) -> dict[str, nn.Module]:
        sizes = (getattr(config, f"{side}_{name}")[s] for name in ("channels", "num_head", "patch_size"))
        channels, heads, patch = sizes
        return {
            f"block{i}": Block(channels, heads, patch, i % len(self.rows), config)
            for i in range(getattr(config, f"{side}_depths")[s])
        }

    def levels(
        self, grid: torch.Tensor, batch: torch.Tensor, counts: Sequence[int]
    ) -> tuple[list[Level], list[Pool]]:
        """All scales of a batch of clouds. grid: [N, 3] int32, without repeated cells; batch: [N] int64, ascending."""
        depths = depths_of(grid, batch, len(counts))
        codes = serialize_points(grid, batch, depths)
        first = torch.stack([codes[self.rows[i]] for i in self.shuffles[0]])
        levels, pools = [Level(grid, batch, depths, first, tuple(counts))], []
        for stride, shuffle in zip(self.stride, self.shuffles[1:], strict=True):
            level, pool = pooled(levels[-1], stride, shuffle)
            levels.append(level)
            pools.append(pool)
        return levels, pools

    def forward(self, feat: torch.Tensor, levels: Sequence[Level], pools: Sequence[Pool]) -> torch.Tensor:
        """feat: [N, in_channels]. Returns logits [N, num_classes], or features [N, dec_channels[0]] without a head."""
        x = self.embedding(feat, levels[0])
        skips = []
        for s, level in enumerate(levels):
            for name, layer in _layers(self.enc, f"enc{s}"):
                x = layer(x, pools[s - 1]) if name == "down" else layer(x, level)
            skips.append(x)
        for s in reversed(range(len(pools))):
            seen = None
            for name, layer in _layers(self.dec, f"dec{s}"):
                if name == "up":
                    x, seen = layer(x, skips[s], pools[s])
                else:  # the first convolution reads a point's own features, as in the class that was trained
                    x, seen = layer(x, levels[s], seen), None
        return x if self.seg_head is None else self.seg_head(x)

    def ready(self, folder: Path, dummy: bool) -> None:
        """See dlrm_v2.py."""

    def refresh(self) -> None:
        """See dlrm_v2.py."""

    def read(self, given: Any) -> Sample:
        """See dlrm_v2.py. given: {"coord": [[x, y, z], ...], "feat": [[numbers], ...], "grid_size": 0.02}.

        coord and feat may be arrays, or base64 of little-endian float32. Of the points in one cell of grid_size a side,
        the first one's features count.
        """
        fields(given, FIELDS)
        coord = _rows(given.get("coord"), "coord", 3)
        feat = _rows(given.get("feat"), "feat", self.in_channels)
        if len(coord) != len(feat):
            raise ValueError(f"the input has {len(coord)} points in `coord` and {len(feat)} in `feat`")
        size = given.get("grid_size")
        if not is_number(size) or not 0 < size < float("inf"):
            raise ValueError(
                f"the input needs `grid_size`, the side of a cell, a number above 0, got {reprlib.repr(size)}"
            )
        low = coord.min(0)
        extent = float((coord.max(0).astype(np.float64) - low).max()) / float(size)
        if not extent < 1 << DEEPEST:
            raise ValueError(
                f"the input is {extent:.4g} cells of grid_size {float(size):g} wide, and {1 << DEEPEST} are possible:"
                " use a larger grid_size"
            )
        grid = torch.div(torch.from_numpy(coord - low), float(size), rounding_mode="trunc").long().numpy()
        grid = grid.clip(0, (1 << DEEPEST) - 1)  # float32 may round up
        key = grid[:, 0] << 2 * DEEPEST | grid[:, 1] << DEEPEST | grid[:, 2]
        _, first, cell = np.unique(key, return_index=True, return_inverse=True)
        return Sample(grid[first].astype(np.int32), feat[first], cell.astype(np.int64))

    def score(self, samples: Sequence[Sample], activated: Sequence[bool], place: Place) -> Scores:
        """See dlrm_v2.py. For each point its classes' probabilities, or not activated their logits, and the best class.

        Without a head: the features.
        """
        counts = [len(sample.grid) for sample in samples]
        starts = np.cumsum([0, *counts])
        batch = place(np.repeat(np.arange(len(samples)), counts))
        feat = place(np.concatenate([sample.feat for sample in samples])).to(
            self.embedding.stem.conv.weight.dtype
        )
        found = self(
            feat, *self.levels(place(np.concatenate([sample.grid for sample in samples])), batch, counts)
        )
        points = found.float()[
            place(np.concatenate([s.cell + at for s, at in zip(samples, starts, strict=False)]))
        ]
        made: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for part, active in zip(points.split([sample.size for sample in samples]), activated, strict=True):
            if self.seg_head is None:
                made.append((part, None))
            else:
                made.append((part.softmax(1) if active else part, part.argmax(1)))
        return made


def _layers(stages: nn.ModuleDict, name: str) -> list[tuple[str, Any]]:
    """The layers of a stage by name; none of one without layers."""
    return list(stages[name].named_children()) if name in stages else []


def _rows(given: Any, name: str, columns: int) -> np.ndarray:
    """Points [N, columns] in float32. Raises ValueError for anything else, no point, and for NaN and infinity."""
    form = f"`{name}`, a list of {columns} numbers for each point, or base64 of them as float32"
    if given is None:
        raise ValueError(f"the input needs {form}")
    try:
        if isinstance(given, str):
            raw = base64.b64decode(given, validate=True)
            if len(raw) % (4 * columns):
                raise ValueError(f"the input has {len(raw)} bytes in `{name}`, no multiple of {4 * columns}")
            found = np.frombuffer(raw, "<f4").reshape(-1, columns).astype(np.float32)
        else:
            listed = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
            if isinstance(listed, (list, tuple)) and any(
                isinstance(v, (bool, str)) for row in listed for v in row
            ):
                raise TypeError
            with np.errstate(over="ignore"):
                found = np.asarray(listed, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        if str(error).startswith("the input"):
            raise
        raise ValueError(f"the input needs {form}, got {reprlib.repr(given)}") from error
    if not found.size:
        raise ValueError(f"the input has no points in `{name}`")
    if found.ndim != 2 or found.shape[1] != columns:
        raise ValueError(f"the input needs {form}, got the shape {list(found.shape)}")
    finite = np.isfinite(found).all(1)
    if not finite.all():
        at = int(finite.argmin())
        raise ValueError(f"the input has {found[at].tolist()} in `{name}`, at point {at}: no finite numbers")
    return found


ARCH = Architecture(
    names=("PointTransformerV3",),
    category="geometry",
    model="PointTransformerV3",
    runner="Segment",
    inputs="points",
    model_type="ptv3",
    packed={},
    prefixes={
        "module.backbone.": "",
        "backbone.": "",
        "module.": "",
    },  # of the segmentor, and of DistributedDataParallel
    unused=("*num_batches_tracked",),
    own_config="fastkernels.models.geometry.ptv3:read_config",
)
