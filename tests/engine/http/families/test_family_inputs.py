"""Hard and bad inputs for the nine families beyond language and vision, on running servers.

Each gets the result of the reference, or 400 with the limit, and never an error of the server, which answers the next
request. Files such as test_rendering.py have further bodies that are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from support import clouds, policies, recommenders, scenes, structures, worlds
from support.live import live_server, wait_for

from fastkernels.engine.http.requests.config import ServerConfig

Case = tuple[dict[str, Any], str]  # fields that differ from a right request; words of the refusal, or ""
CLOUD = clouds.lists(clouds.cloud(30))
CAMERA = scenes.views(1)[0]
BEHIND = [[-1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, -9], [0, 0, 0, 1]]  # the scene is behind it
PI0, DP3 = (policies.as_json(policies.observations(name, 1)[0]) for name in ("pi0", "dp3"))
CLICK = recommenders.impressions(3)[2]
TOO_LARGE = policies.as_url(Image.new("1", (10_000, 10_000)))
CHAIN = {"num_samples": 1, "num_steps": 1, "num_recycles": 0}


def scene(folder: Path) -> None:
    scenes.save_ply(folder / "point_cloud.ply")


def sparse_graph(folder: Path) -> None:
    """LightGCN in whose graph user 3 and item 0 have no edges."""
    recommenders.lightgcn(folder)
    file, users = folder / "graph.safetensors", recommenders.LIGHTGCN["num_users"]
    edges = load_file(file)["edge_index"]
    save_file({"edge_index": edges[:, ((edges != 3) & (edges != users)).all(0)].contiguous()}, file)


def points(**changes: Any) -> dict[str, Any]:
    return {"inputs": {**CLOUD, **changes}}


def world() -> dict[str, Any]:
    prompt = worlds.walk(1, 1)
    return {
        **prompt,
        "images": [policies.as_url(image) for image in prompt["images"]],
        "num_inference_steps": 1,
    }


FAMILIES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any], list[Case]]] = {
    "3dgs": (scene, "/v1/render", {"cameras": CAMERA}, [
        ({"cameras": {**CAMERA, "viewmat": BEHIND}}, ""),
        ({"cameras": {**CAMERA, "width": 10_000, "height": 10_000}}, "at most 70000 pixels, got 100000000"),
        ({"cameras": []}, "at least one camera"),
    ]),
    "instant_ngp": (scenes.save_ngp, "/v1/render", {"cameras": CAMERA}, [
        ({"cameras": {**CAMERA, "viewmat": BEHIND}}, ""),
        ({"cameras": {**CAMERA, "width": 10_000, "height": 10_000}}, "at most 70000 pixels, got 100000000"),
    ]),
    "ptv3": (clouds.ptv3, "/v1/segmentations", points(), [
        (points(coord=[[1.0, 2.0, 3.0]] * 30), ""),
        (points(coord=[], feat=[]), "input 0 "),
        (points(coord=[[0.0, None, 0.0], *CLOUD["coord"][1:]]), "coord"),
        (points(coord=[[1e38, 0, 0], *CLOUD["coord"][1:]]), "and 65536 are possible: use a larger grid_size"),
    ]),
    "dp3": (policies.dp3, "/v1/actions", {"inputs": DP3}, [
        ({"inputs": {**DP3, "point_cloud": np.ones((2, 40, 3)).tolist()}}, ""),
        ({"inputs": {**DP3, "point_cloud": []}}, "point_cloud"),
        ({"inputs": {**DP3, "point_cloud": [[0, None, 0]]}}, "point_cloud"),
        ({"num_actions": 10_000}, "num_actions must be at most"),
    ]),
    "pi0": (policies.pi0, "/v1/actions", {"inputs": PI0}, [
        ({"num_actions": 10_000}, "num_actions must be at most"),
        ({"inputs": {**PI0, "state": [0.0] * 99}}, "99 numbers in `state`"),
        ({"inputs": {**PI0, "images": [TOO_LARGE]}}, "67108864 pixels"),
    ]),
    "openfold3": (structures.checkpoint, "/v1/structures", {"chains": [{"sequence": "MKV"}], **CHAIN}, [
        ({"chains": [{"sequence": "M"}]}, ""),
        ({"chains": [{"sequence": "A", "kind": "rna"}]}, ""),
        ({"chains": [{"sequence": "M" * 20_000}]}, "has 20000 residues, and a request may have 40"),
        ({"chains": [{"sequence": ""}]}, "sequence"),
    ]),
    "dlrm_v2": (recommenders.dlrm, "/v1/scores", {"inputs": CLICK}, [
        ({"inputs": {**CLICK, "sparse": {}}}, ""),
        ({"inputs": {**CLICK, "sparse": {"f0": [], "t2": []}}}, ""),
        ({"inputs": {**CLICK, "sparse": {"f0": [50]}}}, "50"),
        ({"inputs": {**CLICK, "sparse": {"t2": [2**40]}}}, "300"),
    ]),
    "lightgcn": (sparse_graph, "/v1/scores", {"inputs": {"user": 4, "k": 3}}, [
        ({"inputs": {"user": 3, "k": 3}}, ""),
        ({"inputs": {"user": 4, "items": [0]}}, ""),
        ({"inputs": {"user": 10**9}}, "user"),
        ({"inputs": {"user": 4, "items": [10**9]}}, "items"),
    ]),
    "oasis": (worlds.oasis, "/v1/frames", world(), [
        ({"actions": [{"jump": 1}] * 401}, "actions must be at most 400, got 401"),
        ({"images": [TOO_LARGE]}, "67108864 pixels"),
        ({"actions": []}, "at least one action"),
    ]),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "3dgs": {"max_pixels": 70_000},
    "instant_ngp": {"max_pixels": 70_000},
    "ptv3": {"max_model_len": 4096},
    "openfold3": {"max_model_len": 40, "max_images": 4},
    "oasis": {"max_frames": 400},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_server_answers_after_hard_inputs(name: str, tmp_path: Path, caplog: Any) -> None:
    make, path, right, cases = FAMILIES[name]
    make(tmp_path)
    options = {"num_blocks": None, "max_model_len": None, **OPTIONS.get(name, {})}
    with live_server(tmp_path, ServerConfig(name), **options) as (url, _):

        def ask(changes: dict[str, Any]) -> httpx.Response:
            answer = httpx.post(url + path, json={**right, **changes}, timeout=120)
            if answer.status_code == 200 and path == "/v1/structures":
                job = f"{url}{path}/{answer.json()['id']}"
                wait_for(lambda: httpx.get(job, timeout=60).json()["status"] in ("completed", "failed"))
                assert httpx.get(job, timeout=60).json()["status"] == "completed"
            return answer

        for changes, words in cases:
            answer = ask(changes)
            assert answer.status_code == (400 if words else 200), (changes, answer.text[:500])
            assert words in answer.text and "NaN" not in answer.text, answer.text[:500]
            assert ask({}).status_code == 200, changes
    assert not [record for record in caplog.records if record.exc_info]
