"""/v1/segmentations of videos: objects that keep their number, files and frames, aborted clips, and refused bodies."""

from __future__ import annotations

import base64
import io
import re
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from support.live import live_server, wait_for
from support.segmenters import frames_of, make_sam3_video, mask_of

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.routes.video_files import write_mp4
from fastkernels.engine.objects import segmentation
from fastkernels.engine.objects.segmentation import CLIP_FRAMES
from fastkernels.engine.sampling.pooling import PoolingParams

FRAMES = frames_of(5)


def encoded(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(frames: list[Any], kind: str = "jpeg") -> dict[str, Any]:
    url = f"data:video/{kind};base64," + ",".join(map(encoded, frames))
    return {"type": "video_url", "video_url": {"url": url}}


VIDEO, PNG = part(FRAMES), encoded(FRAMES[0])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sam3")
    make_sam3_video(folder, det_nms_thresh=0.5)
    with live_server(
        folder, ServerConfig("sam"), num_blocks=None, max_model_len=None, max_waiting=8
    ) as found:
        yield *found, LLM(str(folder), device="cpu")


def post(url, **body):
    return httpx.post(url + "/v1/segmentations", json=body, timeout=120)


def test_objects_of_a_clip_are_those_of_the_engine(served):
    url, server, llm = served
    (output,) = llm.segment(video=FRAMES, text=["cat", "dog"], use_tqdm=False)
    answer = post(url, input=VIDEO, text=["cat", "dog", "cat"]).json()
    (one,) = answer["data"]
    assert one["texts"] == ["cat", "dog"] and one["size"] == [64, 48] and one["object"] == "segmentation"
    assert answer["usage"]["prompt_tokens"] == 5 * 16
    sums = re.findall(r"(?m)^vllm:request_prompt_tokens_sum\S* (\S+)$", httpx.get(url + "/metrics").text)
    assert [float(value) for value in sums] == [5 * 16]  # of the first request of this server
    assert len(one["frames"]) == 5 and any(frame["object_ids"] for frame in one["frames"])
    for frame, want in zip(one["frames"], output.outputs.frames, strict=True):
        assert frame["object_ids"] == want.object_ids and frame["labels"] == want.labels
        assert frame["scores"] == pytest.approx(want.scores, abs=1e-4)
        for rle, mask in zip(frame["masks"], want.masks, strict=True):
            assert (mask_of(rle) != mask).mean() < 1e-2
    rows = output.outputs.data
    assert rows.shape[1] == 7 and rows[:, 1].tolist() == [
        i for f in output.outputs.frames for i in f.object_ids
    ]
    assert not server.llm.engine.runner.segmenting._clips


def test_clips_run_beside_images_and_other_clips(served):
    url, _, llm = served
    prompts: list[Any] = [
        {"video": FRAMES, "text": "cat"}, {"image": FRAMES[0], "text": "cat"}, {"video": FRAMES[:2], "text": "dog"},
    ]  # fmt: skip
    first, image, last = llm.segment(prompts, PoolingParams("segment", threshold=0), use_tqdm=False)
    assert len(first.outputs.frames) == 5 and len(last.outputs.frames) == 2
    assert image.outputs.size == (64, 48) and len(image.outputs.scores) == 6
    (alone,) = llm.segment(prompts[0], use_tqdm=False)
    assert [f.object_ids for f in alone.outputs.frames] == [f.object_ids for f in first.outputs.frames]
    data = post(
        url,
        input=[VIDEO, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}],
        text="cat",
    ).json()["data"]
    assert [one["index"] for one in data] == [0, 1] and "frames" in data[0] and data[1]["text"] == "cat"


def test_failed_step_forgets_its_clips(served, monkeypatch):
    llm = served[2]
    segmenting = llm.llm_engine.runner.segmenting
    follow = segmenting.follow

    def fail(clips, to_device):
        follow(clips, to_device)
        if clips:
            raise RuntimeError("no memory")

    monkeypatch.setattr(segmenting, "follow", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        llm.segment(video=FRAMES, text="cat", use_tqdm=False)
    assert not segmenting._clips and not llm.llm_engine.has_unfinished_requests()


def test_scores_below_the_threshold_and_masks_can_be_left_out(served):
    url, _, _ = served
    (plain,) = post(url, input=VIDEO, text="cat", masks=False).json()["data"]
    assert all(frame["masks"] is None for frame in plain["frames"])
    (few,) = post(url, input=VIDEO, text="cat", threshold=0.999).json()["data"]
    assert [frame["object_ids"] for frame in few["frames"]] == [[]] * 5


def test_files_are_read(served, tmp_path):
    pytest.importorskip("av")
    url, _, _ = served
    write_mp4(tmp_path / "clip.mp4", np.stack([np.asarray(frame) for frame in FRAMES[:3]]), 8)
    data = base64.b64encode((tmp_path / "clip.mp4").read_bytes()).decode()
    answer = post(url, input=f"data:video/mp4;base64,{data}", text="cat")
    assert len(answer.json()["data"][0]["frames"]) == 3, answer.text
    broken = post(url, input=f"data:video/mp4;base64,{data[:64]}", text="cat")
    assert broken.status_code == 400 and "input 0 has a video" in broken.text


def test_client_that_leaves_ends_its_clip(served):
    """The memory of the clip is free, and the server goes on."""
    url, server, _ = served
    engine = server.llm.engine

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                url + "/v1/segmentations", json={"input": part(frames_of(48)), "text": "cat"}, timeout=0.5
            )

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    wait_for(lambda: not engine.has_unfinished_requests() and not engine.runner.segmenting._clips)
    assert post(url, input=PNG, text="cat").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": VIDEO}, "text", "a prompt has a text, boxes, or both"),
        ({"input": PNG, "marks": [{"points": None}]}, "marks", "marks[0]: points are missing"),
        ({"input": VIDEO, "text": ["cat"] * 17}, "input", "17 texts are more than the queue holds"),
        ({"input": VIDEO, "text": "a " * 40}, "text", "reads at most 32"),
        ({"input": VIDEO, "text": "cat", "boxes": [[1, 1, 9, 9]]}, "boxes", "applies to images, not to a video"),
        ({"input": VIDEO, "text": "cat", "semantic": True}, "semantic", "applies to images"),
        ({"input": VIDEO, "text": "cat", "max_detections": 3}, "max_detections", "applies to images"),
        ({"input": part(frames_of(65)), "text": "cat"}, "input", "of 65 frames, and at most 64"),
        ({"input": part([FRAMES[0], FRAMES[0].resize((20, 20))]), "text": "cat"}, "input", "of several sizes"),
        ({"input": "data:video/jpeg;base64,AAAA", "text": "cat"}, "input", "frame 0"),
        ({"input": "data:video/mp4;base64,AAAA", "text": "cat"}, "input", "video"),
        ({"input": {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}}, "text": "cat"}, "input",
         "downloads nothing"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused(served, body, param, words):
    answer = post(served[0], **body)
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert answer.json()["error"]["param"].partition(".")[0].partition("[")[0] == param, answer.text


def test_wrong_clips_are_refused(served, monkeypatch):
    _, _, llm = served
    monkeypatch.setattr(segmentation, "MOST_FRAMES", 3)
    for call, message in (
        (lambda: llm.segment(), "segment: give inputs, or the video of a clip and its text"),
        (lambda: llm.segment({"image": FRAMES[0], "text": "a"}, text="a"), "text belongs to video"),
        (lambda: llm.segment(video=FRAMES, text="cat"), "a video of 5 frames, and at most 3 are possible"),
        (lambda: llm.segment(video=[], text="cat"), "a video without frames"),
        (lambda: llm.segment(video=FRAMES[:2], text=["a"] * 17), "1 to 16 texts for a video, got 17"),
        (lambda: llm.segment({"video": FRAMES[:2], "text": "a", "boxes": []}), "the fields boxes; known are"),
        (lambda: llm.segment(video="clip.mp4", text="a"), "a video of a str"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_waiting_clip_holds_the_patches_of_one_step(served):
    """Those of 64 frames of 1,008 pixels would be 0.8 GB."""
    _, _, llm = served
    prompt = {"video": FRAMES * 12, "text": "cat"}
    array = np.stack([np.asarray(frame) for frame in prompt["video"]])
    request = llm.llm_engine.make_request("clip", {**prompt, "video": array}, PoolingParams("segment"))
    array[:] = 0  # as a caller may do at once
    clip = request.clip
    assert len(clip) == 60 and request.all_tokens == 60 * request.num_tokens
    assert len(clip._ahead.result()) == CLIP_FRAMES
    for start in range(0, 60, CLIP_FRAMES):
        found = clip.take(start)
        want = [
            llm.llm_engine.images.patches(frame) for frame in prompt["video"][start : start + CLIP_FRAMES]
        ]
        assert all((mine.values == other.values).all() for mine, other in zip(found, want, strict=True))
    assert not clip._ahead.done()
