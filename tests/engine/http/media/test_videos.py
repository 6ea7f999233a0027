"""/v1/videos: OpenAI's client, jobs and their limits, and bodies that are refused."""

from __future__ import annotations

import asyncio
import io
import time
from concurrent.futures import ThreadPoolExecutor

import av
import httpx
import numpy as np
import openai
import pytest
from support.live import before_steps, live_server, wait_for
from support.tiny_pipelines import make_tiny_hunyuan

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.routes.videos import Videos
from fastkernels.engine.scheduling.denoising import VideoParams

PATH = "/v1/videos"
OPTIONS = {
    "num_blocks": None,
    "max_model_len": None,
    "max_pixels": 64 * 64,
    "max_steps": 60,
    "max_frames": 49,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hunyuan(tmp_path_factory.mktemp("pipeline") / "hunyuan")


@pytest.fixture(scope="module")
def served(folder):
    config = ServerConfig("hunyuan", max_jobs=4)
    with live_server(folder, config, max_waiting=6, **OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def url(served):
    return served[0]


def post(url, **body):
    return httpx.post(url + PATH, json=body, timeout=60)


def get(url, path=""):
    return httpx.get(f"{url}{PATH}{path}", timeout=60)


def delete(url, video_id):
    return httpx.delete(f"{url}{PATH}/{video_id}", timeout=60)


def frames_of(data):
    with av.open(io.BytesIO(data)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def ended(url, video_id):
    wait_for(lambda: get(url, f"/{video_id}").json()["status"] in ("completed", "failed"))
    return get(url, f"/{video_id}").json()


def test_openai_client_makes_a_video(url, folder):
    with LLM(str(folder), device="cpu") as llm:
        params = VideoParams(1, 32, 48, 2, seed=5, num_frames=9)
        (want,) = llm.generate_videos("a red cat", params, use_tqdm=False)
    more = {"seed": 5, "num_inference_steps": 2, "num_frames": 9}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        video = client.videos.create(prompt="a red cat", model="hunyuan", size="48x32", extra_body=more)
        assert video.object == "video" and video.status in ("queued", "in_progress") and video.size == "48x32"
        ended(url, video.id)
        video = client.videos.retrieve(video.id)
        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        assert video.completed_at <= video.expires_at
        found = frames_of(client.videos.download_content(video.id).read())
        assert [v.id for v in client.videos.list()] == [video.id]
        assert client.videos.delete(video.id).deleted
    assert found.shape == want.arrays[0].shape == (9, 32, 48, 3)
    assert np.abs(found.astype(float) - want.arrays[0]).mean() < 40  # lossy, and noise is hard for it
    assert get(url, f"/{video.id}").status_code == 404


def test_running_video_can_be_cancelled(served):
    url, server = served
    job = post(url, prompt="a cat", size="64x64", num_frames=49, num_inference_steps=60).json()
    assert get(url, f"/{job['id']}/content").status_code == 400
    assert "it is queued" in (text := get(url, f"/{job['id']}/content").text) or "in_progress" in text
    assert delete(url, job["id"]).json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
    wait_for(lambda: not server.llm.engine.requests)
    assert get(url, f"/{job['id']}").status_code == delete(url, job["id"]).status_code == 404


def test_jobs_are_capped(url):
    body = {"prompt": "a cat", "size": "16x16", "num_frames": 1, "num_inference_steps": 1}
    made = [post(url, **body).json()["id"] for _ in range(4)]
    answer = post(url, **body)
    assert answer.status_code == 429 and "there are 4 videos" in answer.json()["error"]["message"]
    listed = get(url, "?limit=3").json()
    assert [v["id"] for v in listed["data"]] == made[:0:-1] and listed["has_more"]
    rest = get(url, f"?limit=3&after={made[1]}").json()
    assert [v["id"] for v in rest["data"]] == [made[0]] and not rest["has_more"]
    for one in made:
        assert ended(url, one)["status"] == "completed"
        delete(url, one)
    assert post(url, **body).status_code == 200
    delete(url, get(url).json()["data"][0]["id"])
    assert "fastkernels:videos_total{" in httpx.get(f"{url}/metrics").text


def test_jobs_at_once_are_capped(served, monkeypatch):
    """Requests that arrive together pass the limit one by one."""
    url, server = served
    queue = server.llm.open

    async def slow(requests):
        await asyncio.sleep(0.2)
        return await queue(requests)

    monkeypatch.setattr(server.llm, "open", slow)
    body = {"prompt": "a cat", "size": "64x64", "num_frames": 49, "num_inference_steps": 60}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(url, **body), range(6)))
    assert sorted(a.status_code for a in answers) == [200] * 4 + [429] * 2
    for answer in answers:
        if answer.status_code == 200:
            assert delete(url, answer.json()["id"]).status_code == 200
    wait_for(lambda: not server.llm.engine.requests)


def test_half_written_video_fails_and_leaves_no_file(served, monkeypatch):
    url, _ = served
    paths = []

    def full(self, path, output):
        paths.append(path)
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Videos, "write", full)
    body = {"prompt": "a cat", "size": "16x16", "num_frames": 1, "num_inference_steps": 1}
    job = ended(url, post(url, **body).json()["id"])
    assert job["status"] == "failed" and "No space left on device" in job["error"]["message"]
    assert [path.exists() for path in paths] == [False]
    assert delete(url, job["id"]).status_code == 200


def test_old_and_large_videos_are_forgotten(folder):
    body = {"prompt": "a cat", "size": "16x16", "num_frames": 1, "num_inference_steps": 1}
    with live_server(folder, ServerConfig("hunyuan", max_job_bytes=1), **OPTIONS) as (url, server):
        first = post(url, **body).json()["id"]
        ended(url, first)
        second = post(url, **body).json()["id"]
        ended(url, second)
        assert [v["id"] for v in get(url).json()["data"]] == [second]
        server.context.config.__dict__["job_ttl"] = 0.0
        time.sleep(0.01)
        assert get(url).json()["data"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 3], ids=["quick", "longer-than-the-server"])
def test_end_of_the_server_ends_its_videos(folder, caplog, seconds):
    """Also while a step takes longer than the server waits for its last answers."""
    body = {"prompt": "a cat", "size": "64x64", "num_frames": 49, "num_inference_steps": 60}
    with (
        live_server(folder, ServerConfig("hunyuan"), **OPTIONS) as (url, server),
        before_steps(server, lambda: time.sleep(seconds)),
    ):
        made = [post(url, **body).json()["id"] for _ in range(1 if seconds else 2)]
    said = [f"the video {one} failed: the server is shutting down" for one in made]
    assert sorted(r.getMessage() for r in caplog.records if "failed" in r.getMessage()) == sorted(said)
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "prompt"),
        ({"prompt": "x" * 1200}, "prompt", "and the text encoder takes 1000"),
        ({"prompt": '"' + "x" * 300 + '"'}, "prompt", "of quoted words the text encoder takes 256"),
        ({"size": "32"}, "size", "WIDTHxHEIGHT"),
        ({"size": "40x32"}, "size", "width must be a multiple of 16, got 40"),
        ({"size": "96x96"}, "size", "height times width must be at most 4096 pixels"),
        ({"num_frames": 8}, "num_frames", "num_frames must be 1 more than a multiple of 4, got 8"),
        ({"num_frames": 53}, "num_frames", "num_frames must be at most 49, got 53"),
        ({"seconds": 3}, "seconds", "seconds must be a number above 0, at most 2.0, got 3"),
        ({"seconds": "many"}, "seconds", "seconds must be a number above 0"),
        ({"seconds": 10**400}, "seconds", "seconds must be a number above 0, at most 2.0, got 1000"),
        ({"seconds": [1]}, "seconds", "seconds: "),
        ({"seconds": 1, "num_frames": 5}, "seconds", "exclude each other"),
        ({"num_inference_steps": 61}, "num_inference_steps", "must be at most 60, got 61"),
        ({"guidance_scale": 101}, "guidance_scale", "guidance_scale"),
        ({"frames": 5}, "frames", "unknown field"),
    ],
)
def test_wrong_bodies_are_refused(url, changes, param, words):
    answer = post(url, **{"prompt": "a cat", **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and error["param"] == param, error


def test_wrong_forms_queries_and_models_are_refused(url):
    given = {"prompt": (None, "a cat"), "seed": (None, "many")}
    answer = httpx.post(url + PATH, files=given, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "seed"
    answer = httpx.post(url + PATH, files={"prompt": (None, "a cat"), "input_reference": b"abc"}, timeout=60)
    assert answer.status_code == 400 and "input_reference is a file" in answer.json()["error"]["message"]
    assert post(url, prompt="a cat", model="other").status_code == 404
    for query in ("?limit=0", "?limit=many", "?order=up", f"?limit={'9' * 5000}"):
        assert get(url, query).status_code == 400
    assert get(url, "?after=video_1").status_code == get(url, "/video_1/content").status_code == 404
    answer = httpx.post(f"{url}/v1/images/generations", json={"prompt": "a cat"}, timeout=60)
    assert answer.status_code == 404 and "LLM.generate_videos and /v1/videos" in answer.text
