"""Point Transformer V3: against its equations in float64, key names, batches, and clouds and configs that are refused.

The equations are written here once more, with dense convolutions and loops over patches. The values of
`test_result_is_that_of_the_repository` are recorded from Pointcept/PointTransformerV3 at commit 3229e9b.
"""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fk_bench.info.verified import POINTS
from support import clouds

from fastkernels import LLM
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build

State = dict[str, torch.Tensor]
Cell = tuple[int, int, int]


def hilbert(cell: Cell, depth: int) -> int:
    """The cell's number along the curve, by Skilling's transform of its transposed bits."""
    x = list(cell)
    bit = 1 << depth >> 1
    while bit:
        for axis in range(3):
            if x[axis] & bit:
                x[0] ^= bit - 1
            else:
                swapped = (x[0] ^ x[axis]) & (bit - 1)
                x[0], x[axis] = x[0] ^ swapped, x[axis] ^ swapped
        bit >>= 1
    bits = "".join(str(x[axis] >> i & 1) for i in reversed(range(depth)) for axis in range(3))
    code, last = 0, 0
    for one in bits:
        last ^= int(one)
        code = 2 * code + last
    return code


def z_order(cell: Cell, depth: int) -> int:
    return int(
        "0" + "".join(str(cell[axis] >> i & 1) for i in reversed(range(depth)) for axis in range(3)), 2
    )


class Equations:
    """The class of the paper's repository for one cloud, cell by cell, in float64."""

    def __init__(self, state: State, config: dict[str, Any]) -> None:
        self.p, self.config = {key: value.double() for key, value in state.items()}, config
        self.shuffle = torch.Generator().manual_seed(config["shuffle_seed"])

    def dense(self, x: torch.Tensor, key: str) -> torch.Tensor:
        return x @ self.p[f"{key}.weight"].T + self.p[f"{key}.bias"]

    def layer_norm(self, x: torch.Tensor, key: str) -> torch.Tensor:
        y = (x - x.mean(1, True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return y * self.p[f"{key}.weight"] + self.p[f"{key}.bias"]

    def norm_gelu(self, x: torch.Tensor, key: str) -> torch.Tensor:
        p = {n: self.p[f"{key}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")}
        y = (x - p["running_mean"]) / (p["running_var"] + 1e-3).sqrt() * p["weight"] + p["bias"]
        return y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))

    def conv(self, x: torch.Tensor, cells: list[Cell], key: str) -> torch.Tensor:
        weight = self.p[f"{key}.weight"]
        size = [max(c[a] for c in cells) + 1 for a in range(3)]
        dense = x.new_zeros(1, x.shape[1], *size)
        at = torch.tensor(cells).unbind(1)
        dense[0][:, at[0], at[1], at[2]] = x.T
        bias = self.p.get(f"{key}.bias")
        out = F.conv3d(dense, weight.permute(0, 4, 1, 2, 3), bias, padding=weight.shape[1] // 2)
        return out[0][:, at[0], at[1], at[2]].T

    def attention(self, x: torch.Tensor, order: list[int], heads: int, size: int, key: str) -> torch.Tensor:
        q, k, v = self.dense(x, f"{key}.qkv").view(len(x), 3, heads, -1).unbind(1)
        out = torch.zeros_like(x)
        for start in range(0, len(order), size):
            own = order[start : start + size]
            missing = size - len(own) if len(order) > size else 0
            seen = own + order[start - size + len(own) : start] if missing else own
            assert not missing or len(seen) == size
            weights = (torch.einsum("qhd,khd->hqk", q[own], k[seen]) * q.shape[-1] ** -0.5).softmax(-1)
            out[own] = torch.einsum("hqk,khd->qhd", weights, v[seen]).flatten(1)
        return self.dense(out, f"{key}.proj")

    def block(
        self, x: torch.Tensor, seen: torch.Tensor, level: Any, heads: int, size: int, i: int, key: str
    ) -> torch.Tensor:
        cells, orders = level
        x = x + self.layer_norm(
            self.dense(self.conv(seen, cells, f"{key}.cpe.0"), f"{key}.cpe.1"), f"{key}.cpe.2"
        )
        before = self.config.get("pre_norm", True)
        order = orders[i % len(orders)]
        given = self.layer_norm(x, f"{key}.norm1.0") if before else x
        x = x + self.attention(given, order, heads, size, f"{key}.attn")
        x = x if before else self.layer_norm(x, f"{key}.norm1.0")
        given = self.layer_norm(x, f"{key}.norm2.0") if before else x
        wide = self.dense(given, f"{key}.mlp.0.fc1")
        x = x + self.dense(wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2))), f"{key}.mlp.0.fc2")
        return x if before else self.layer_norm(x, f"{key}.norm2.0")

    def __call__(self, cells: list[Cell], feat: torch.Tensor) -> torch.Tensor:
        c = self.config
        depth = max(map(max, cells)).bit_length()
        codes = [
            [curve((b, a, z) if turned else (a, b, z), depth) for a, b, z in cells]
            for curve in (z_order, hilbert) for turned in (False, True)
        ]  # fmt: skip

        def permuted(codes: list[list[int]]) -> list[list[int]]:
            return [codes[i] for i in torch.randperm(len(codes), generator=self.shuffle).tolist()]

        def level(cells: list[Cell], codes: list[list[int]]) -> Any:
            return cells, [sorted(range(len(cells)), key=code.__getitem__) for code in codes]

        codes = permuted(codes) if c["shuffle_orders"] else codes
        levels, clusters, skips = [level(cells, codes)], [], []
        x = self.norm_gelu(self.conv(feat.double(), cells, "embedding.stem.conv"), "embedding.stem.norm")
        for s in range(len(c["enc_depths"])):
            if s:
                bits = (c["stride"][s - 1] - 1).bit_length()
                bits = 0 if bits > depth else bits
                depth -= bits
                codes = [[v >> 3 * bits for v in code] for code in codes]
                places = sorted(set(codes[0]))
                cluster = [places.index(v) for v in codes[0]]
                heads = [cluster.index(i) for i in range(len(places))]
                codes = permuted([[code[h] for h in heads] for code in codes])
                wide, of = self.dense(x, f"enc.enc{s}.down.proj"), torch.tensor(cluster)
                x = torch.stack([wide[of == i].amax(0) for i in range(len(places))])
                x = self.norm_gelu(x, f"enc.enc{s}.down.norm.0")
                cells = [(a >> bits, b >> bits, z >> bits) for a, b, z in (cells[h] for h in heads)]
                levels.append(level(cells, codes))
                clusters.append(of)
            for i in range(c["enc_depths"][s]):
                sizes = c["enc_num_head"][s], c["enc_patch_size"][s]
                x = self.block(x, x, levels[s], *sizes, i, f"enc.enc{s}.block{i}")
            skips.append(x)
        for s in reversed(range(len(clusters))):
            up = self.norm_gelu(self.dense(x, f"dec.dec{s}.up.proj.0"), f"dec.dec{s}.up.proj.1")
            seen = self.norm_gelu(
                self.dense(skips[s], f"dec.dec{s}.up.proj_skip.0"), f"dec.dec{s}.up.proj_skip.1"
            )
            x = seen + up[clusters[s]]
            for i in range(c["dec_depths"][s]):
                sizes = c["dec_num_head"][s], c["dec_patch_size"][s]
                x = self.block(x, x if i else seen, levels[s], *sizes, i, f"dec.dec{s}.block{i}")
        return self.dense(x, "seg_head") if c["num_classes"] else x


def by_equations(state: State, config: dict[str, Any], cloud: dict[str, Any]) -> torch.Tensor:
    """A row for each point: that of the first point of its cell."""
    coord = cloud["coord"]
    grid = ((coord - coord.min(0).values) / cloud["grid_size"]).int().tolist()
    first: dict[Cell, int] = {}
    for i, cell in enumerate(grid):
        first.setdefault(tuple(cell), i)
    cells = list(first)
    out = Equations(state, config)(cells, cloud["feat"][list(first.values())])
    return out[[cells.index(tuple(cell)) for cell in grid]]


CONFIGS: dict[str, dict[str, Any]] = {
    "segmentor": {},
    "unpermuted": {"shuffle_orders": False, "pre_norm": False},
    "features": {"num_classes": 0, "enc_depths": [0, 1, 1]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_ptv3_equals_its_equations(tmp_path: Path, name: str) -> None:
    """A batch of clouds of 257 cells to one: each has the result that it has alone."""
    config = {**clouds.PTV3, **CONFIGS[name]}
    state = clouds.ptv3(tmp_path, **CONFIGS[name])
    given = [clouds.cloud(n, seed=n) for n in (300, 30, 1, 9)]
    with LLM(str(tmp_path), device="cpu") as llm:
        together = llm.segment(given, use_activation=False, use_tqdm=False)
        alone = [llm.segment(one, use_tqdm=False)[0].outputs for one in given[:2]]
    for cloud, found in zip(given, together, strict=True):
        want = by_equations(state, config, cloud)
        torch.testing.assert_close(
            torch.from_numpy(found.outputs.data).double(), want, atol=POINTS, rtol=POINTS
        )
        if config["num_classes"]:
            assert found.outputs.item_ids == want.argmax(1).tolist()
            assert found.num_tokens == len(cloud["coord"])
        else:
            assert found.outputs.items is None
    for one, found in zip(alone, together, strict=False):
        data = torch.from_numpy(found.outputs.data)
        data = data.softmax(1) if config["num_classes"] else data
        torch.testing.assert_close(torch.from_numpy(one.data), data, atol=POINTS, rtol=POINTS)


RECORDED = {  # logits of every 75th point, of the class with enable_flash=False
    "segmentor": [
        [2.2454, -2.2528, 0.555, 8.2834, 5.307], [0.7515, -2.236, 2.8477, 3.8719, 2.0166],
        [3.5325, 2.9622, 5.6176, 3.7883, 6.3698], [3.5291, 1.0226, 2.1204, 10.2765, 9.0016],
    ],
    "unpermuted": [
        [0.0661, 1.1487, 0.4326, -0.5611, -0.582], [0.2792, 0.9554, 0.3233, 0.2128, -0.9558],
        [0.2534, 1.2698, 0.5166, -0.5729, 0.0625], [0.4658, 0.0635, 0.7455, -0.5299, 0.813],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_result_is_that_of_the_repository(tmp_path: Path, name: str) -> None:
    clouds.ptv3(tmp_path, **CONFIGS[name])
    with LLM(str(tmp_path), device="cpu") as llm:
        (found,) = llm.segment(clouds.cloud(300, seed=300), use_activation=False, use_tqdm=False)
    want = torch.tensor(RECORDED[name])
    torch.testing.assert_close(torch.from_numpy(found.outputs.data[::75]), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", ["", "backbone.", "module."])
def test_keys_of_all_wrappers_are_read(tmp_path: Path, prefix: str) -> None:
    """The class alone, Pointcept's segmentor, and the class under DistributedDataParallel."""
    clouds.ptv3(tmp_path / "one", prefix)
    clouds.ptv3(tmp_path / "other")
    cloud, found = clouds.cloud(40), []
    for name in ("one", "other"):
        with LLM(str(tmp_path / name), device="cpu") as llm:
            found.append(llm.segment(cloud, use_tqdm=False)[0].outputs.data)
    assert np.array_equal(*found)


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    """Equal points are one cell; base64, arrays and lists are the same cloud."""
    (tmp_path / "config.json").write_text(json.dumps(clouds.PTV3))
    cloud = clouds.cloud(50)
    texts = {k: base64.b64encode(cloud[k].numpy().tobytes()).decode() for k in ("coord", "feat")}
    same = {"coord": [[1.5, -2, 3]] * 7, "feat": [[1, 2, 3, 4]] * 7, "grid_size": 1e-4}
    with LLM(str(tmp_path), device="cpu", load_format="dummy") as llm:
        forms = [cloud, clouds.lists(cloud), {**texts, "grid_size": cloud["grid_size"]}, same]
        first, *others, equal = (o.outputs.data for o in llm.segment(forms, use_tqdm=False))
    assert np.isfinite(first).all() and all(np.array_equal(first, other) for other in others)
    assert np.isfinite(equal).all() and (equal == equal[0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_channels": 0}, "config.in_channels=0 is not supported"),
        ({"num_classes": -1}, "config.num_classes=-1 is not supported"),
        ({"enable_rpe": True}, "config.enable_rpe=True is not supported, only false"),
        ({"cls_mode": True}, "config.cls_mode=True is not supported"),
        ({"pdnorm_bn": True}, "config.pdnorm_bn=True is not supported"),
        ({"order": ["z", "peano"]}, r"config.order=\['z', 'peano'\] is not a list of z, z-trans"),
        ({"enc_depths": 3}, r"config.enc_depths=3 must be a list"),
        ({"dec_depths": [1]}, r"config.dec_depths=\[1\] must be a list of 2 integers from 0 on"),
        ({"enc_num_head": [3, 3, 2]}, "config.enc_channels has 16, which 3 heads do not divide"),
        ({"stride": [2, 3]}, r"config.stride=\[2, 3\] must be powers of two"),
        ({"dec_patch_size": [16, 8]}, r"config.dec_patch_size=\[16, 8\] must be enc_patch_size without"),
        ({"mlp_ratio": "4"}, "config.mlp_ratio='4' is not supported"),
    ],
)
def test_wrong_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**clouds.PTV3, **changes}))
    with pytest.raises(CheckpointError, match=rf"config.json cannot be used: .*{message}"):
        build.load_config(tmp_path)


COORD, FEAT = [[0.0, 0, 0], [1, 1, 1]], [[1.0, 2, 3, 4], [5, 6, 7, 8]]
BAD = [
    ("text", "must be an object with coord, feat, grid_size"),
    ({"coord": COORD, "feats": FEAT}, "unknown field 'feats'; known: coord, feat, grid_size"),
    ({"feat": FEAT, "grid_size": 1}, "needs `coord`, a list of 3 numbers for each point, or base64"),
    ({"coord": [], "feat": [], "grid_size": 1}, "has no points in `coord`"),
    ({"coord": COORD, "feat": FEAT[:1], "grid_size": 1}, "has 2 points in `coord` and 1 in `feat`"),
    ({"coord": [[0, 0, math.nan], [0, 0, 0]], "feat": FEAT, "grid_size": 1}, "at point 0: no finite numbers"),
    (
        {"coord": COORD, "feat": [FEAT[0], [1, 2, 3, 1e39]], "grid_size": 1},
        "in `feat`, at point 1: no finite",
    ),
    ({"coord": [[0, 0]], "feat": FEAT, "grid_size": 1}, r"needs `coord`.* got the shape \[1, 2\]"),
    ({"coord": [[0, 0, 0], [1, 1]], "feat": FEAT, "grid_size": 1}, "needs `coord`"),
    ({"coord": [1, 2, 3], "feat": FEAT, "grid_size": 1}, r"needs `coord`.*got \[1, 2, 3\]"),
    ({"coord": [[0, 0, "1"]], "feat": FEAT, "grid_size": 1}, "needs `coord`"),
    ({"coord": [[0, 0, 10**400]], "feat": FEAT, "grid_size": 1}, "needs `coord`"),
    ({"coord": "AAAA", "feat": FEAT, "grid_size": 1}, "has 3 bytes in `coord`, no multiple of 12"),
    ({"coord": "?", "feat": FEAT, "grid_size": 1}, "needs `coord`"),
    ({"coord": COORD, "feat": FEAT}, "needs `grid_size`, the side of a cell, a number above 0, got None"),
    ({"coord": COORD, "feat": FEAT, "grid_size": 0}, "needs `grid_size`.* got 0"),
    ({"coord": COORD, "feat": FEAT, "grid_size": math.nan}, "needs `grid_size`.* got nan"),
    (
        {"coord": COORD, "feat": FEAT, "grid_size": 1e-5},
        "is 1e.05 cells of grid_size 1e-05 wide, and 65536 are",
    ),
    ({"coord": [[-3e38] * 3, [3e38] * 3], "feat": FEAT, "grid_size": 1}, "cells of grid_size 1 wide"),
    (
        {"coord": COORD * 101, "feat": FEAT * 101, "grid_size": 1},
        "has 202 points, and a request may have 200",
    ),
]


def test_wrong_clouds_are_refused(tmp_path: Path) -> None:
    clouds.ptv3(tmp_path)
    with LLM(str(tmp_path), device="cpu", max_model_len=200) as llm:
        for given, message in BAD:
            with pytest.raises(ValueError, match=message):
                llm.segment([given], use_tqdm=False)
        with pytest.raises(ValueError, match="clouds must be a dict or a list of dicts, got 'a'"):
            llm.segment("a")
        with pytest.raises(ValueError, match=re.escape("is for LLM.segment and /v1/segmentations")):
            llm.embed("a")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size 2 is not supported for models of point clouds, only 1",
        ),
        ({"num_blocks": 5}, "num_blocks applies to models that generate; .* is a model of point clouds"),
        ({"max_num_seqs": 5000}, "max_num_seqs 5000 is more than the 4096 clouds that a step can have"),
    ],
)
def test_options_of_other_models_are_refused(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    clouds.ptv3(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), device="cpu", **option)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gpu_equals_the_equations(tmp_path: Path, dtype: str) -> None:
    state = clouds.ptv3(tmp_path)
    given = [clouds.cloud(n, seed=n) for n in (300, 30, 1)]
    with LLM(str(tmp_path), device="cuda", dtype=dtype) as llm:
        found = llm.segment(given, use_activation=False, use_tqdm=False)
    atol = 2e-3 if dtype == "float32" else 5e-2  # tf32
    for cloud, output in zip(given, found, strict=True):
        want = by_equations(state, clouds.PTV3, cloud)
        error = (torch.from_numpy(output.outputs.data).double() - want).abs().max()
        assert float(error) < atol * max(float(want.abs().max()), 1.0)
