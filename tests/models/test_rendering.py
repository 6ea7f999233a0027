"""3DGS and Instant-NGP: against their papers' equations in float64, file formats, and scenes that are refused.

tests/integrations/rendering compares the Gaussians' functions with gsplat.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import scenes

from fastkernels import LLM, RenderParams, SamplingParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.overrides.geometry.spherical_harmonics import basis

RAW = RenderParams(raw=True)


def images(folder: Path, given: list[dict[str, Any]], **config: Any) -> list[np.ndarray]:
    with LLM(str(folder), device="cpu", **config) as llm:
        return [o.array for o in llm.render(given, RAW, use_tqdm=False)]


def splatted(camera: dict[str, Any]) -> torch.Tensor:
    """3DGS in float64, pixel by pixel over all Gaussians: no tiles and no rectangles."""
    p = {name: value.double() for name, value in scenes.gaussians().items()}
    view, k = (torch.tensor(camera[name], dtype=torch.float64) for name in ("viewmat", "K"))
    w, x, y, z = F.normalize(p["quats"], dim=1).T
    turn = torch.stack(
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z),
         1 - 2 * (x * x + z * z), 2 * (y * z - w * x), 2 * (x * z - w * y), 2 * (y * z + w * x),
         1 - 2 * (x * x + y * y)], 1,
    ).view(-1, 3, 3)  # fmt: skip
    covariance = turn @ torch.diag_embed(p["scales"].exp() ** 2) @ turn.transpose(1, 2)
    at = p["means"] @ view[:3, :3].T + view[:3, 3]
    eye = -view[:3, :3].T @ view[:3, 3]
    shown = torch.einsum(
        "nk,nkc->nc", basis(F.normalize(p["means"] - eye, dim=1), 2), torch.cat((p["sh0"], p["shN"]), 1)
    )
    color, opacity = (shown + 0.5).clamp_min(0), p["opacities"].sigmoid()
    rows, columns = torch.meshgrid(
        torch.arange(camera["height"]).double() + 0.5,
        torch.arange(camera["width"]).double() + 0.5,
        indexing="ij",
    )
    image = torch.zeros(camera["height"], camera["width"], 3, dtype=torch.float64)
    light = torch.ones(camera["height"], camera["width"], 1, dtype=torch.float64)
    done = torch.zeros_like(light, dtype=torch.bool)
    for g in at[:, 2].argsort().tolist():
        tx, ty, tz = at[g]
        if tz < 0.01:
            continue
        limit_x, limit_y = 0.65 * camera["width"] / k[0, 0], 0.65 * camera["height"] / k[1, 1]
        ux, uy = (tx / tz).clamp(-limit_x, limit_x), (ty / tz).clamp(-limit_y, limit_y)
        jacobian = torch.tensor(
            [[k[0, 0] / tz, 0, -k[0, 0] * ux / tz], [0, k[1, 1] / tz, -k[1, 1] * uy / tz]]
        )
        half = jacobian.double() @ view[:3, :3]
        flat = half @ covariance[g] @ half.T + 0.3 * torch.eye(2, dtype=torch.float64)
        inverse = torch.linalg.inv(flat)
        d = torch.stack((columns - k[0, 0] * tx / tz - k[0, 2], rows - k[1, 1] * ty / tz - k[1, 2]), -1)
        alpha = opacity[g] * torch.exp(-0.5 * torch.einsum("yxi,ij,yxj->yx", d, inverse, d))
        alpha = alpha.clamp_max(0.999).where(alpha >= 1 / 255, 0)[..., None]
        done |= light * (1 - alpha) <= 1e-4
        alpha = alpha.where(~done, 0)
        image += light * alpha * color[g]
        light = light * (1 - alpha)
    return torch.cat((image + light * torch.tensor(camera["background"]), 1 - light), -1)


@pytest.fixture(scope="module")
def gaussians(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gaussians")
    scenes.save_safetensors(folder)
    return folder


def test_gaussians_equal_their_equations(gaussians: Path) -> None:
    given = scenes.views(2, background=[0.2, 0.7, 1.0])
    for found, camera in zip(images(gaussians, given), given, strict=True):
        off = (torch.from_numpy(found).double() - splatted(camera)).abs()
        assert found.shape == (scenes.HEIGHT, scenes.WIDTH, 4) and off.max() < 5e-4


def test_every_format_is_the_same_scene(gaussians: Path, tmp_path: Path) -> None:
    """A folder with several iterations of 3DGS renders the last one."""
    given = scenes.views(1)
    (want,) = images(gaussians, given)
    scenes.save_gsplat(tmp_path / "gsplat")
    scenes.save_ply(tmp_path / "ply" / "scene.ply")
    scenes.save_ply(tmp_path / "3dgs/point_cloud/iteration_7000/point_cloud.ply", 3)
    scenes.save_ply(tmp_path / "3dgs/point_cloud/iteration_30000/point_cloud.ply")
    for name in ("gsplat", "ply", "3dgs"):
        (found,) = images(tmp_path / name, given)
        np.testing.assert_allclose(found, want, atol=1e-5)


def test_batches_and_sizes_do_not_change_an_image(gaussians: Path) -> None:
    given = [*scenes.views(2), *scenes.views(2, 17, 33, seed=1), scenes.views(1, seed=2)[0]]
    together, alone = images(gaussians, given), images(gaussians, given, max_num_seqs=1)
    assert [i.shape for i in together] == [(c["height"], c["width"], 4) for c in given]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_eight_bits_and_pose(gaussians: Path) -> None:
    camera = scenes.views(1, background=[1, 1, 1])[0]
    moved = {**camera, "pose": np.linalg.inv(np.array(camera["viewmat"])), "viewmat": None}
    with LLM(str(gaussians), device="cpu") as llm:
        raw, bits, posed = llm.render([camera, camera, moved], [RAW, RenderParams(), RAW], use_tqdm=False)
        assert bits.array.dtype == np.uint8 and bits.image.size == (scenes.WIDTH, scenes.HEIGHT)
        np.testing.assert_array_equal(bits.array, np.round(raw.array[..., :3].clip(0, 1) * 255))
        np.testing.assert_allclose(posed.array, raw.array, atol=1e-4)
        with pytest.raises(ValueError, match="a raw image has no PIL form"):
            _ = raw.image


def test_gaussians_behind_the_camera_leave_the_background(gaussians: Path) -> None:
    camera = scenes.views(1, background=[0.25, 0.5, 1.0])[0]
    camera["viewmat"] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, -50], [0, 0, 0, 1]]
    (found,) = images(gaussians, [camera])
    assert (found == np.array([0.25, 0.5, 1.0, 0.0], np.float32)).all()


def test_antialiased_scenes_are_fainter(tmp_path: Path) -> None:
    scenes.save_safetensors(tmp_path / "a")
    scenes.save_safetensors(tmp_path / "b", antialiased=True)
    plain, soft = (images(tmp_path / name, scenes.views(1))[0] for name in "ab")
    assert soft[..., 3].sum() < plain[..., 3].sum()


@pytest.mark.parametrize("config", [{"num_gaussians": 40, "sh_degree": 1}, scenes.NGP])
def test_random_weights_need_no_checkpoint(tmp_path: Path, config: dict[str, Any]) -> None:
    fields = {"architectures": ["GaussianSplatting"], "model_type": "gaussian_splatting", **config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    given = scenes.views(1, 12, 9)
    first, second = (images(tmp_path, given, load_format="dummy")[0] for _ in range(2))
    assert np.isfinite(first).all() and (first == second).all()


# ---- Instant-NGP


def radiance(
    made: dict[str, torch.Tensor], place: torch.Tensor, way: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(color, density) of one sample in float64, by the paper: hash grids, and two networks of ReLUs."""
    c, p = scenes.NGP, {name: value.double() for name, value in made.items()}
    x = (place - 0.5) / c["aabb_scale"] + 0.5
    features, first = [], 0
    for level in range(c["levels"]):
        scale = c["base_resolution"] * c["per_level_scale"] ** level - 1
        side = math.ceil(scale) + 1
        rows = min(-(-(side**3) // 8) * 8, 2 ** c["log2_hashmap_size"])
        at = x * scale + 0.5
        low, total = at.floor(), torch.zeros(c["features_per_level"], dtype=torch.float64)
        for corner in np.ndindex(2, 2, 2):
            cell = [int(v) + d for v, d in zip(low.tolist(), corner, strict=True)]
            weight = math.prod(f if d else 1 - f for f, d in zip((at - low).tolist(), corner, strict=True))
            number = cell[0] + side * (cell[1] + side * cell[2])
            hashed = cell[0] ^ (cell[1] * 2654435761 & 0xFFFFFFFF) ^ (cell[2] * 805459861 & 0xFFFFFFFF)
            total += weight * p["table"][first + (number if side**3 <= rows else hashed) % rows]
        features.append(total)
        first += rows
    w, h = c["width"], torch.cat(features)
    hidden = (p["density_net"][: w * 16].view(w, 16) @ h).clamp_min(0)
    hidden = p["density_net"][w * 16 :].view(16, w) @ hidden
    h = torch.cat((hidden, basis(way, c["sh_degree"]), torch.ones(7, dtype=torch.float64)))
    one, two, three = p["color_net"].split([w * 32, w * w, 16 * w])
    h = (two.view(w, w) @ (one.view(w, 32) @ h).clamp_min(0)).clamp_min(0)
    return (three.view(16, w) @ h)[:3].sigmoid(), hidden[0].exp()


def test_instant_ngp_equals_its_equations(tmp_path: Path) -> None:
    made = scenes.save_ngp(tmp_path)
    grids = made["density_grid"].view(2, -1) > 0.01
    cells: list[list[list[list[bool]]]] = []
    for level in range(2):
        cells.append(
            [[[bool(grids[level][sum(((v >> b) & 1) << (3 * b + i) for i, v in enumerate((x, y, z)) for b in range(3))])
               for z in range(8)] for y in range(8)] for x in range(8)]
        )  # fmt: skip
    for x, y, z in np.ndindex(8, 8, 8):  # the coarse grid holds the fine one
        if cells[0][x][y][z]:
            cells[1][2 + x // 2][2 + y // 2][2 + z // 2] = True
    (camera,) = scenes.views(1, 3, 1, center=(0.5, 0.5, 0.5), distance=1.4, background=[1.0, 0.0, 0.5])
    view, k = (torch.tensor(camera[name], dtype=torch.float64) for name in ("viewmat", "K"))
    (found,) = images(tmp_path, [camera])
    small, large = math.sqrt(3) / 1024, math.sqrt(3) * 2 / 8
    for row, column in np.ndindex(1, 3):
        way = torch.tensor([(column + 0.5 - k[0, 2]) / k[0, 0], (row + 0.5 - k[1, 2]) / k[1, 1], 1]).double()
        way = F.normalize(view[:3, :3].T @ way, dim=0)
        start = -view[:3, :3].T @ view[:3, 3]
        sides = torch.stack(((-0.5 - start) / way, (1.5 - start) / way))
        t, end = max(float(sides.amin(0).max()), 0.0), float(sides.amax(0).min())
        color, light = torch.zeros(3).double(), 1.0
        while t < end and light > 1e-4:
            step = min(max(t / 256, small), large)
            place = start + t * way
            far = float((place - 0.5).abs().max())
            level = int(far >= 0.5 or step * 16 >= 1)
            cell = [math.floor(v) for v in (((place - 0.5) * 0.5**level + 0.5) * 8).tolist()]
            if all(0 <= v < 8 for v in cell) and cells[level][cell[0]][cell[1]][cell[2]]:
                own, density = radiance(made, place, way)
                alpha = 1 - math.exp(-float(density) * step)
                color, light = color + light * alpha * own, light * (1 - alpha)
            t += step
        want = torch.cat((color + light * torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1 - light])))
        torch.testing.assert_close(torch.from_numpy(found[row, column]).double(), want, atol=5e-4, rtol=0)


@pytest.mark.parametrize("suffix", ["ingp", "msgpack"])
def test_snapshots_are_the_same_field(tmp_path: Path, suffix: str) -> None:
    scenes.save_ngp(tmp_path / "own")
    scenes.save_snapshot(tmp_path / "theirs" / f"base.{suffix}")
    given = scenes.views(1, 6, 4, center=(0.5, 0.5, 0.5), distance=1.4)
    (want,), (found,) = images(tmp_path / "own", given), images(tmp_path / "theirs", given, dtype="float32")
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert want[..., 3].max() > 0.1


# ---- Scenes and cameras that are refused


def refused(folder: Path, error: str) -> None:
    with pytest.raises(CheckpointError, match=error):
        LLM(str(folder), device="cpu")


def test_damaged_scenes_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")
    file = tmp_path / "a.ply"
    scenes.save_ply(file)
    whole = file.read_bytes()
    for data, error in (
        (whole[:-4], "truncated"),
        (b"no ply", "not a PLY file"),
        (whole.replace(b"binary_little_endian", b"ascii", 1), "'ascii 1.0'"),
        (whole.replace(b"float opacity", b"float opaqueness", 1), "have no opacity"),
        (whole.replace(b"element vertex 60", b"element vertex 0", 1), "a.ply has no Gaussians"),
        (whole.replace(b"property float x", b"property list x", 1), "'property list x'"),
    ):
        file.write_bytes(data)
        refused(tmp_path, error)
    file.unlink()
    (tmp_path / "ckpt_1.pt").write_bytes(b"x")
    refused(tmp_path, "not a checkpoint of gsplat")
    torch.save({"splats": {"means": torch.zeros(1, 3)}}, tmp_path / "ckpt_1.pt")
    refused(tmp_path, "must have means, scales")
    (tmp_path / "ckpt_1.pt").unlink()
    for data, error in ((b"\x78\x9cbad", "not a snapshot"), (b"\x01", "no 'encoding'")):
        (tmp_path / "a.ingp").write_bytes(data)
        refused(tmp_path, error)
    scenes.save_snapshot(tmp_path / "a.ingp", encoding={"otype": "Frequency"})
    refused(tmp_path, "'Frequency' is not supported")
    scenes.save_snapshot(tmp_path / "a.ingp", snapshot={"nerf": {"aabb_scale": 2}})
    refused(tmp_path, "has 0 parameters")


def test_nan_in_a_scene_is_refused(tmp_path: Path) -> None:
    scenes.save_safetensors(tmp_path)
    made = scenes.gaussians()
    made["means"][3, 1] = math.nan
    scenes.save_file(made, tmp_path / "model.safetensors")
    refused(tmp_path, "means")


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        ("gaussians", {"num_gaussians": 0}, "num_gaussians=0"),
        ("gaussians", {"sh_degree": 5}, "sh_degree=5"),
        ("gaussians", {"eps2d": "x"}, "eps2d='x'"),
        ("gaussians", {"dtype": "float16"}, "dtype='float16'"),
        ("ngp", {"aabb_scale": 3}, "aabb_scale=3"),
        ("ngp", {"grid": 100}, "grid=100"),
        ("ngp", {"log2_hashmap_size": 40}, "log2_hashmap_size=40"),
        ("ngp", {"offset": [1, 2]}, re.escape("offset=[1, 2]")),
        ("ngp", {"levels": 0}, "levels=0"),
    ],
)
def test_configs_that_no_model_has_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], error: str
) -> None:
    if kind == "ngp":
        (tmp_path / "config.json").write_text(json.dumps({**scenes.NGP, **changes}))
    else:
        scenes.save_safetensors(tmp_path, **changes)
    with pytest.raises(ValueError, match=error):
        build.load_config(tmp_path)


def test_cameras_that_are_no_cameras_are_refused(gaussians: Path) -> None:
    good = scenes.views(1)[0]
    with LLM(str(gaussians), device="cpu") as llm:
        for changes, error in (
            ({"width": 10_000, "height": 10_000}, "at most 16777216 pixels, got 100000000 "),
            ({"width": 0}, "width must be an integer of at least 1, got 0"),
            ({"height": 2.0}, "height must be an integer"),
            ({"K": [[1, 0, 0], [0, 1, 0]]}, "K must be 3 x 3"),
            ({"K": [[1, 0, 0], [0, -1, 0], [0, 0, 1]]}, "focal lengths above 0"),
            ({"K": [[1, 2, 0], [0, 1, 0], [0, 0, 1]]}, "K must be "),
            ({"viewmat": None}, "viewmat or pose is needed"),
            ({"pose": good["viewmat"]}, "not both"),
            ({"viewmat": [[math.nan] * 4] * 4}, "finite numbers"),
            ({"viewmat": np.eye(4) * 2}, "a rotation and a translation"),
            ({"viewmat": np.diag([1.0, -1, 1, 1])}, "mirrors the scene"),
            ({"background": [1, 2]}, "background must be 3"),
            ({"background": []}, "background must be 3"),
            ({"fov": 3}, "fov is not a field"),
        ):
            with pytest.raises(ValueError, match=error):
                llm.render({**good, **changes})
        with pytest.raises(ValueError, match="camera must be an object"):
            llm.render(3)
        red, *others = (
            llm.render({**good, "background": color}, RAW)[0].array
            for color in ((1, 0.5, 0), np.array([1, 0.5, 0]), torch.tensor([1, 0.5, 0]))
        )
        assert red[..., 0].max() > 0.5 and all((red == other).all() for other in others)
        with pytest.raises(ValueError, match="a scene takes RenderParams, got SamplingParams"):
            llm.render(good, SamplingParams())
        with pytest.raises(ValueError, match="1 cameras and 2 params"):
            llm.render(good, [RAW, RAW])
        with pytest.raises(ValueError, match=r"is for LLM\.render"):
            llm.generate("text")
    with pytest.raises(ValueError, match="tensor_parallel_size 2"):
        LLM(str(gaussians), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="num_blocks applies to models of tokens"):
        LLM(str(gaussians), device="cpu", num_blocks=10)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gaussians", "ngp"])
def test_images_of_a_gpu_are_those_of_the_cpu(tmp_path: Path, kind: str) -> None:
    if kind == "ngp":
        scenes.save_ngp(tmp_path)
        given = scenes.views(2, 24, 18, center=(0.5, 0.5, 0.5), distance=1.4)
    else:
        scenes.save_safetensors(tmp_path)
        given = scenes.views(2)
    want = images(tmp_path, given)
    with LLM(str(tmp_path), device="cuda") as llm:
        found = [o.array for o in llm.render(given, RAW, use_tqdm=False)]
    for one, other in zip(found, want, strict=True):
        off = np.abs(one - other)
        assert off.mean() < 1e-3 and (off > 2e-2).mean() < 1e-2
