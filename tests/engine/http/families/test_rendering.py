"""/v1/render: images of a scene's cameras, batches across requests, and bodies that are refused."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image
from support import scenes
from support.live import live_server

from fastkernels import LLM, RenderParams
from fastkernels.engine.http.requests.config import ServerConfig

OPTIONS = {
    "num_blocks": None,
    "max_model_len": None,
    "max_waiting": 6,
    "max_num_seqs": 4,
    "max_pixels": 70_000,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scene")
    scenes.save_ply(folder / "point_cloud.ply")
    with live_server(folder, ServerConfig("scene"), **OPTIONS) as (url, server):
        yield url, server, LLM(str(folder), device="cpu")


def post(url, **body):
    return httpx.post(url + "/v1/render", json=body, timeout=60)


def test_images_are_those_of_the_engine(served):
    url, _, llm = served
    given = [*scenes.views(2, background=[1, 0.5, 0]), *scenes.views(1, 20, 30)]
    raw = [o.array for o in llm.render(given, RenderParams(raw=True), use_tqdm=False)]
    answer = post(url, model="scene", cameras=given, output_format="raw").json()
    assert answer["object"] == "list" and answer["model"] == "scene" and answer["output_format"] == "raw"
    for i, (found, want) in enumerate(zip(answer["data"], raw, strict=True)):
        assert (found["index"], found["height"], found["width"]) == (i, *want.shape[:2])
        values = np.frombuffer(base64.b64decode(found["b64_json"]), "<f4").reshape(want.shape)
        np.testing.assert_allclose(values, want, atol=1e-5)
    for kind, most in (("png", 0.3), ("webp", 30), ("jpeg", 30)):
        (one,) = post(url, cameras=given[0], output_format=kind).json()["data"]
        picture = Image.open(io.BytesIO(base64.b64decode(one["b64_json"])))
        off = np.abs(np.asarray(picture.convert("RGB")).astype(float) - 255 * raw[0][..., :3].clip(0, 1))
        assert picture.format == kind.upper() and off.mean() <= most


def test_longest_sides_of_formats_are_encoded(served):
    url, _, _ = served
    for kind, width in (("webp", 16_383), ("jpeg", 65_500)):
        answer = post(url, cameras={**scenes.views(1)[0], "width": width, "height": 1}, output_format=kind)
        assert answer.status_code == 200 and answer.json()["data"][0]["width"] == width


def test_requests_share_steps(served):
    url, server, _ = served
    engine, step, sizes = server.llm.engine, server.llm.engine.step, []

    def counted():
        found = step()
        sizes.append(len(found))
        return found

    engine.step = counted
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda c: post(url, cameras=c), scenes.views(6)))
    finally:
        engine.step = step
    assert {a.status_code for a in answers} == {200} and sum(sizes) == 6 and max(sizes) <= 4


def test_metrics_count_images(served):
    url, _, _ = served

    def count():
        lines = httpx.get(url + "/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:request_success_total"))

    before = count()
    post(url, cameras=scenes.views(2))
    assert count() == before + 2


def test_wrong_bodies_name_the_field(served):
    url, _, _ = served
    good = scenes.views(1)[0]
    for camera, error in (
        ({**good, "width": 10_000, "height": 10_000}, "at most 70000 pixels, got 100000000 (10000 x 10000)"),
        ({**good, "viewmat": None}, "viewmat or pose is needed"),
        ({**good, "K": [[0, 0, 0], [0, 1, 0], [0, 0, 1]]}, "focal lengths above 0"),
        ({**good, "K": [[1, 0], [0, 1]]}, "K"),
        ({**good, "viewmat": [[2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]}, "a rotation"),
        ({**good, "background": [1e300, 0, 0]}, "background must be 3 finite numbers"),
        ({**good, "fov": 1}, "cameras[0].fov: "),
        ({**good, "width": "40"}, "cameras[0].width: "),
        ({**good, "K": [[1, 0, 0], [0, None, 0], [0, 0, 1]]}, "cameras[0].K[1][1]: "),
        ({}, "cameras[0].width is required"),
        (None, "cameras[0]: must be a JSON object, got null"),
    ):
        answer = post(url, cameras=[camera])
        assert answer.status_code == 400 and error in answer.json()["error"]["message"], answer.text
    for body, error in (
        ({"cameras": []}, "at least one camera"),
        ({"cameras": [good] * 7}, "7 cameras are more than the queue holds, 6"),
        ({"cameras": good, "output_format": "bmp"}, "output_format"),
        ({"cameras": good, "output_compression": 5}, "output_compression needs"),
        (
            {"cameras": [good, {**good, "width": 16_384, "height": 1}], "output_format": "webp"},
            "'webp' stores at most 16383 pixels a side, got 16384 x 1",
        ),
        (
            {"cameras": {**good, "width": 1, "height": 65_501}, "output_format": "jpeg"},
            "'jpeg' stores at most 65500 pixels a side, got 1 x 65501",
        ),
        ({}, "cameras is required"),
        ({"cameras": "all"}, 'cameras: must be a JSON object, or a list, got "all"'),
    ):
        answer = post(url, **body)
        assert answer.status_code == 400 and error in answer.json()["error"]["message"], answer.text
    assert httpx.post(url + "/v1/render", content=b'{"cameras": [NaN]}').status_code == 400
    other = httpx.post(url + "/v1/completions", json={"prompt": "x"})
    assert other.status_code == 404 and "/v1/render" in other.json()["error"]["message"]
    assert post(url, cameras=good).status_code == 200
