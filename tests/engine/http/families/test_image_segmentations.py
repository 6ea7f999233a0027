"""/v1/segmentations of images: masks of what prompts name, batches of requests, and bodies that are refused."""

from __future__ import annotations

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from support.detectors import pictures
from support.live import live_server
from support.segmenters import make_sam3, make_sam3_tracker, mask_of

from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.sampling.pooling import PoolingParams

IMAGES = pictures((80, 70), (64, 64))


def encoded(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG, OTHER = map(encoded, IMAGES)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sam3")
    make_sam3(folder)
    with live_server(
        folder, ServerConfig("sam"), num_blocks=None, max_model_len=None, max_waiting=8
    ) as found:
        yield *found, LLM(str(folder), device="cpu")


def post(url, path="/v1/segmentations", **body):
    return httpx.post(url + path, json=body, timeout=60)


def test_masks_are_those_of_the_engine(served):
    url, _, llm = served
    prompts = [{"image": image, "text": text} for image in IMAGES for text in ("black cat", "dog")]
    params = PoolingParams("segment", threshold=0.02, max_detections=4, semantic=True)
    want = [o.outputs for o in llm.segment(prompts, params, use_tqdm=False)]
    body = {"threshold": 0.02, "max_detections": 4, "semantic": True, "text": ["black cat", "dog"]}
    answer = post(url, model="sam", input=[f"data:image/png;base64,{PNG}", OTHER], **body).json()
    assert answer["object"] == "list" and answer["id"].startswith("segmentations-")
    assert answer["usage"]["prompt_tokens"] == 4 * 16
    assert [(one["index"], one["text"]) for one in answer["data"]] == [
        (i, text) for i in (0, 1) for text in ("black cat", "dog")
    ]
    for one, output in zip(answer["data"], want, strict=True):
        assert one["scores"] == pytest.approx(output.scores, abs=1e-5) and one["scores"]
        np.testing.assert_allclose(one["boxes"], output.boxes, atol=1e-2)
        masks = np.stack([mask_of(rle) for rle in (*one["masks"], one["semantic"])])
        wanted = np.concatenate((output.masks, output.semantic[None]))
        assert masks.shape == wanted.shape and (masks != wanted).mean() < 1e-3  # batches differ
        assert one["labels"] == [one["text"]] * len(one["scores"]) and one["size"] == list(output.size)


def test_boxes_are_examples(served):
    url, _, llm = served
    prompt = {"image": IMAGES[0], "boxes": [[4, 5, 40, 50.5], [1, 1, 9, 9]], "box_labels": [1, 0]}
    (want,) = llm.segment(prompt, PoolingParams("segment", threshold=0, masks=False), use_tqdm=False)
    body = {"boxes": prompt["boxes"], "box_labels": [1, 0], "threshold": 0, "masks": False}
    (one,) = post(url, input=PNG, **body).json()["data"]
    assert one["text"] == "visual" and one["masks"] is one["semantic"] is None
    assert one["scores"] == pytest.approx(want.outputs.scores, abs=1e-5)
    (plain,) = post(url, input=PNG, text="visual", threshold=0).json()["data"]
    assert plain["scores"] != pytest.approx(one["scores"], abs=1e-3)


def test_requests_on_one_image_share_its_features(served):
    url, server, _ = served
    seen = server.llm.engine.runner.segmenting.computed
    post(url, input=PNG, text="ball")
    images, pairs = seen.images, seen.pairs
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: post(url, input=PNG, text=text), ["a", "red", "cat", "dog"]))
    assert [a.status_code for a in answers] == [200] * 4
    assert (seen.images, seen.pairs) == (images, pairs + 4)


HUGE = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    + (60_000).to_bytes(4, "big") * 2
    + b"\x08\x02\x00\x00\x00"
    + bytes(40)
).decode()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": PNG}, "text", "a prompt has a text, boxes, or both"),
        ({"input": PNG, "text": ""}, "text", "at least 1 character"),
        ({"input": PNG, "text": "  "}, "text", "not empty"),
        ({"input": PNG, "text": "a " * 40}, "text", "reads at most 32"),
        ({"input": PNG, "text": "a" * 5000}, "text", "4096"),
        ({"input": PNG, "text": ["cat"] * 65}, "text", "64"),
        ({"input": [PNG] * 3, "text": ["cat"] * 3}, "input", "more than the queue holds, 8"),
        ({"input": PNG, "text": 3}, "text", ""),
        ({"input": PNG, "boxes": [[1, 2, 3]]}, "boxes", "boxes[0]: must have at least 4 entries"),
        ({"input": PNG, "boxes": [[5, 5, 4, 9]]}, "boxes", "0 <= left < right <= 80"),
        ({"input": PNG, "boxes": [[5, 5, 10, 71]]}, "boxes", "<= 70"),
        ({"input": PNG, "boxes": [[1, 1, 2, 2]] * 65}, "boxes", "64"),
        (
            {"input": PNG, "boxes": [[1, 1, 2, 2]], "box_labels": [1, 1]},
            "box_labels",
            "2 entries for 1 boxes",
        ),
        ({"input": PNG, "boxes": [[1, 1, 2, 2]], "box_labels": [2]}, "box_labels", ""),
        ({"input": [PNG, OTHER], "boxes": [[1, 1, 2, 2]]}, "boxes", "belong to one image"),
        ({"input": "a text", "text": "cat"}, "input", "takes images"),
        ({"input": HUGE, "text": "cat"}, "input", "at most 67108864 pixels"),
        ({"input": PNG, "text": "cat", "threshold": 2}, "threshold", ""),
        ({"input": PNG, "text": "cat", "mask_threshold": "x"}, "mask_threshold", ""),
        ({"input": PNG, "text": "cat", "points": [[1, 2]]}, "points", ""),
        ({"text": "cat"}, "input", ""),
    ],
)
def test_bad_bodies_are_refused(served, body, param, words):
    answer = post(served[0], **body)
    assert answer.status_code == 400 and words in answer.text, answer.text
    assert answer.json()["error"]["param"].partition(".")[0].partition("[")[0] == param, answer.text


def test_other_routes_name_the_task(served):
    url, _, _ = served
    answer = post(url, "/v1/embeddings", input=PNG)
    assert answer.status_code == 400 and "is for the task 'segment' only" in answer.text
    assert post(url, "/v1/detections", input=PNG).status_code == 404
    answer = post(url, "/v1/chat/completions", messages=[])
    assert "'sam' is for LLM.segment and /v1/segmentations" in answer.text


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracker")
    make_sam3_tracker(folder)
    with live_server(
        folder, ServerConfig("tracker"), num_blocks=None, max_model_len=None, max_waiting=8
    ) as found:
        yield *found, LLM(str(folder), device="cpu")


def test_marks_are_those_of_the_engine(tracker):
    """A mask of an answer is a mark of the next request."""
    url, _, llm = tracker
    marks = [{"points": [[3, 4], [20.5, 30]], "point_labels": [1, 0]}, {"box": [1, 2, 70, 60]}]
    (first, second) = post(url, input=PNG, marks=marks).json()["data"]
    want = [o.outputs for o in llm.segment([{"image": IMAGES[0], **own} for own in marks], use_tqdm=False)]
    for one, output in zip((first, second), want, strict=True):
        assert one["scores"] == pytest.approx(output.scores, abs=1e-5) and len(one["scores"]) == 3
        assert one["masks"] == output.rles and one["boxes"] == output.boxes
        assert one["presence"] == pytest.approx(output.presence, abs=1e-5)
        assert (one["text"], one["semantic"], one["size"]) == ("", None, [80, 70])
    (again,) = post(url, input=PNG, marks=[{"mask": first["masks"][0]}], multimask_output=False).json()[
        "data"
    ]
    prompt = {"image": IMAGES[0], "mask": want[0].masks[0]}
    (output,) = llm.segment(prompt, PoolingParams("segment", multimask_output=False), use_tqdm=False)
    assert again["masks"] == output.outputs.rles and len(again["masks"]) == 1


MARK = {"points": [[3, 4]]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "marks", "marks are missing: 'tracker' finds what points, a box or a mask mark"),
        ({"text": "cat"}, "marks", "marks are missing"),
        ({"marks": [MARK], "text": "cat"}, "text", "text and marks exclude each other"),
        ({"marks": []}, "marks", "marks: must have at least 1 entry, got []"),
        ({"marks": [MARK] * 65}, "marks", "marks: may have 64 entries, got 65"),
        ({"marks": [MARK] * 9}, "input", "1 images with 9 marks are more than the queue holds, 8"),
        ({"marks": [MARK, {}]}, "marks", "marks[1]: points are missing"),
        ({"marks": [{"points": [[81, 4]]}]}, "marks", "marks[0]: points[0] = [81.0, 4.0] must have 0 <= x <= 80"),
        ({"marks": [{"points": [["3", 4]]}]}, "marks", "valid number"),
        ({"marks": [{"points": [[3, 4]] * 10000}]}, "marks", "marks[0].points: may have 64 entries, got 10000"),
        ({"marks": [{"box": [0, 0, 1e30, 1]}]}, "marks", "box = [0.0, 0.0, 1e+30, 1.0] must have 0 <= left"),
        ({"marks": [{"box": [1, 2, 3]}]}, "marks", "marks[0].box: must have at least 4 entries, got [1, 2, 3]"),
        ({"marks": [{"mask": {"size": [70, 80], "counts": "0"}}]}, "marks", "counts of 0 pixels"),
        ({"marks": [{"circle": 3}]}, "marks", "circle"),
        ({"marks": [MARK], "input": [PNG, OTHER]}, "marks", "marks belong to one image, got 2 images"),
        ({"marks": [MARK], "semantic": True}, "semantic", "semantic applies to texts"),
        ({"marks": [MARK], "multimask_output": "some"}, "multimask_output", "valid boolean"),
    ],
)  # fmt: skip
def test_bad_marks_are_refused(tracker, body, param, words):
    url, _, _ = tracker
    answer = post(url, **{"input": PNG, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].partition("[")[0].partition(".")[0] == param
    assert words in error["message"]
    assert post(url, input=PNG, marks=[MARK]).status_code == 200


def test_marks_for_a_model_of_texts_are_refused(served):
    url, _, _ = served
    answer = post(url, input=PNG, marks=[MARK])
    assert (
        answer.status_code == 400 and "finds what texts and boxes name" in answer.json()["error"]["message"]
    )
