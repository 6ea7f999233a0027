"""Every call with curl and every block of Python in docs/serve.md runs, on tiny models."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import wave
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from support import clouds, guides, policies, recommenders, scenes, structures, worlds
from support.cosyvoice import make_tiny_cosyvoice
from support.detectors import make_rtdetr
from support.live import live_server, wait_for
from support.llada import make_tiny_llada
from support.retrievers import make_tiny_cross_encoder
from support.segmenters import make_sam3, make_sam3_tracker, make_sam3_video
from support.speech import RATE, make_tiny_speech, recording
from support.tiny import make_tiny, make_tiny_vlm
from support.tiny_pipelines import make_tiny_flux, make_tiny_hunyuan
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastkernels
from fastkernels import LLM
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.scheduling.speaking import SpeechParams

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
LONG = {"num_blocks": None, "max_model_len": None}
PICTURE = {**LONG, "max_pixels": 70_000, "max_steps": 50}
SERVER = re.compile(r"http://localhost:8000|localhost:8000")


class Model(NamedTuple):
    """A tiny checkpoint: make(folder) may return its path. options: of the engine."""

    make: Callable[[Path], Any]
    options: dict[str, Any]


def _pi0(folder: Path) -> None:
    policies.pi0(folder, chunk_size=8)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "uncap": 1, "the": 2, "pen": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


def _brief(folder: Path) -> None:
    """A model whose likeliest token is a quotation mark, whatever comes before: texts in JSON soon end."""
    make_tiny(folder, "llama", "float32")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight.fill_(1.0) if "norm" in name else weight.zero_()
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    (quote,) = PreTrainedTokenizerFast.from_pretrained(folder)('"').input_ids
    weights["lm_head.weight"][quote, 0] = 0.4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


MODELS: dict[str, Model] = {
    "text": Model(lambda folder: make_tiny(folder, "llama", "float32"), {"max_model_len": 2000, "num_blocks": 400}),
    "brief": Model(_brief, {"max_model_len": 2000, "num_blocks": 400}),
    "vision": Model(lambda folder: make_tiny_vlm(folder, "qwen3_vl"), {"max_model_len": 300}),
    "llada": Model(make_tiny_llada, {"max_model_len": None}),
    "reranker": Model(make_tiny_cross_encoder, LONG),
    "detector": Model(make_rtdetr, LONG),
    "sam3": Model(make_sam3, LONG),
    "sam3_video": Model(lambda folder: make_sam3_video(folder, det_nms_thresh=0.5), LONG),
    "tracker": Model(make_sam3_tracker, LONG),
    "lightgcn": Model(recommenders.lightgcn, {**LONG, "max_model_len": 100}),
    "pi0": Model(_pi0, {**LONG, "max_model_len": 100}),
    "scene": Model(lambda folder: scenes.save_ply(folder / "point_cloud.ply"), {**LONG, "max_pixels": 400_000}),
    "ptv3": Model(lambda folder: clouds.ptv3(folder, in_channels=6), {**LONG, "max_model_len": 400}),
    "openfold3": Model(structures.checkpoint, {**LONG, "max_model_len": 40}),
    "whisper": Model(make_tiny_speech, {"max_model_len": 56, "num_blocks": 100}),
    "cosyvoice": Model(lambda folder: make_tiny_cosyvoice(folder, "safetensors"), {}),
    "flux": Model(make_tiny_flux, PICTURE),
    "hunyuan": Model(make_tiny_hunyuan, {**PICTURE, "max_frames": 49}),
    "oasis": Model(worlds.oasis, {**LONG, "max_frames": 400, "max_steps": 10}),
}  # fmt: skip


def png(width: int = 320, height: int = 200) -> bytes:
    made, noise = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(made, "PNG")
    return made.getvalue()


def wav() -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((recording(7, 1.0) * 32767).astype("<i2").tobytes())
    return made.getvalue()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "model"
            MODELS[name].make(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def server(folders: Callable[[str], Path]) -> Iterator[Callable[[str, str], str]]:
    """url(model, its name for clients); the server of one model at a time."""
    with ExitStack() as stack:
        current: list[tuple[tuple[str, str], str]] = []

        def url(name: str, served: str = "tiny") -> str:
            if not current or current[0][0] != (name, served):
                stack.close()
                options = dict(MODELS[name].options)
                if name == "cosyvoice":
                    options["voices"] = str(folders(name) / "voices")
                found, _ = stack.enter_context(live_server(folders(name), ServerConfig(served), **options))
                current[:] = [((name, served), found)]
            return current[0][1]

        yield url


def calls() -> list[str]:
    """The command lines with curl; a body may have several lines."""
    found, line = [], ""
    for text in "".join(guides.blocks(PAGE, "bash")).replace("\\\n", " ").splitlines():
        line = f"{line}\n{text}" if line else text
        try:
            shlex.split(line)
        except ValueError:  # inside a quoted text
            continue
        found.append(line)
        line = ""
    return [line for line in found if line.startswith("curl ")]


# {route: (a part of the body, model, fields of another size: a CPU takes minutes for those of the page)}
ROUTES: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "/v1/completions": (("block_length", "llada", {}), ("Hello", "text", {})),
    "/rerank": (("query", "reranker", {}),),
    "/v1/detections": (("input", "detector", {}),),
    "/v1/segmentations": (("text", "sam3", {}), ("marks", "tracker", {}), ("inputs", "ptv3", {})),
    "/v1/scores": (("inputs", "lightgcn", {}),),
    "/v1/actions": (("inputs", "pi0", {}),),
    "/v1/render": (("cameras", "scene", {}),),
    "/v1/structures": (("chains", "openfold3", {}),),
    "/v1/audio/transcriptions": (("", "whisper", {}),),
    "/v1/audio/speech": (("voice", "cosyvoice", {}),),
    "/v1/videos": (("prompt", "hunyuan", {"size": "32x16", "num_frames": 5, "num_inference_steps": 2}),),
    "/v1/frames": (("images", "oasis", {}),),
}  # fmt: skip
POSTS = [line for line in calls() if "structure_ID" not in line]


def test_all_calls_of_the_page_are_found() -> None:
    assert len(POSTS) == PAGE.read_text().count("\ncurl ") - 2


def with_image(text: str) -> str:
    """The page's image is cut."""
    image = base64.b64encode(png()).decode()
    return re.sub(r"(data:image/png;base64,)(iVBORw0KGgo=|\.\.\.)", rf"\g<1>{image}", text)


def request_of(line: str) -> tuple[str, str, dict[str, str]]:
    """(route, body, form) of a command line."""
    line = with_image(line).replace("$(base64 -w0 start.png)", base64.b64encode(png()).decode())
    words, body, form, route = shlex.split(line)[1:], "", {}, ""
    while words:
        word = words.pop(0)
        if word == "-d":
            body = words.pop(0)
        elif word == "-F":
            name, _, value = words.pop(0).partition("=")
            form[name] = value
        elif word in ("-H", "-o"):
            words.pop(0)
        else:
            route = word.removeprefix("localhost:8000")
    return route, body, form


@pytest.mark.parametrize("line", POSTS, ids=lambda line: line[5:60])
def test_call_of_the_page_is_answered(line: str, server: Callable[[str, str], str]) -> None:
    route, text, form = request_of(line)
    name, changes = next((name, changes) for part, name, changes in ROUTES[route] if part in text)
    served = json.loads(text).get("model", "tiny") if text else "tiny"
    url = server(name, served)
    if form:
        fields = {key: value for key, value in form.items() if key != "file"}
        answer = httpx.post(url + route, data=fields, files={"file": (form["file"][1:], wav())}, timeout=300)
    else:
        answer = httpx.post(url + route, json={**json.loads(text), **changes}, timeout=300)
    assert answer.status_code == 200, answer.text[:2000]
    if route == "/v1/structures":
        job = answer.json()["id"]
        gets = [
            request_of(line)[0].replace("structure_ID", job) for line in calls() if "structure_ID" in line
        ]
        wait_for(lambda: httpx.get(url + gets[0]).json()["status"] == "completed", 120)
        assert httpx.get(url + gets[1]).text.startswith("data_")
    elif route == "/v1/videos":
        wait_for(
            lambda: httpx.get(f"{url}{route}/{answer.json()['id']}").json()["status"] == "completed", 120
        )


# (a part of the block, model, whether it is served)
BLOCKS: tuple[tuple[str, str, bool], ...] = (
    ("llm.generate([\"The capital", "text", False),
    ("UnmaskParams", "llada", False),
    ("import anthropic", "text", True),
    ("llm.detect(", "detector", False),
    ('llm.segment({"image"', "sam3", False),
    ("llm.segment(video=", "sam3_video", False),
    ("llm.score(", "lightgcn", False),
    ("llm.act(", "pi0", False),
    ("llm.render(", "scene", False),
    ("Qwen/Qwen3-VL-8B-Instruct", "vision", True),
    ("<|image_pad|>", "vision", False),
    ('"type": "video_url"', "", False),
    ("llm.transcribe(", "whisper", False),
    ('"audio": (samples', "whisper", False),
    ("llm.speak(", "cosyvoice", False),
    ("client.images.generate", "flux", True),
    ("llm.generate_images", "flux", False),
    ("class City", "brief", True),
)  # fmt: skip
# Sizes of which a CPU takes minutes
SMALLER = {'size="1024x768"': 'size="64x48"', "height=768, width=1024": "height=48, width=64"}
PYTHON = guides.blocks(PAGE, "python")


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: re.sub(r"\W+", "-", code[:50]))
def test_block_of_python_runs(
    code: str, folders: Callable[[str], Path], server: Callable[[str, str], str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (found,) = (block for block in BLOCKS if block[0] in code)
    _, name, served = found
    options = MODELS[name].options if name else {}
    monkeypatch.chdir(tmp_path)
    for file in ("street.jpg", "start.png"):
        Path(file).write_bytes(png())
    Path("talk.mp3").write_bytes(wav())
    if name == "cosyvoice":
        Path("voices").symlink_to(folders(name) / "voices")
    model = re.search(r'model="([^"]+)"', code)
    url = server(name, model[1] if model else "tiny") if served else ""

    def tiny(_: str, **more: Any) -> LLM:
        return LLM(str(folders(name)), device="cpu", **{"num_blocks": 200, **options, **more})

    monkeypatch.setattr(fastkernels, "LLM", tiny)
    space: dict[str, Any] = {
        "LLM": tiny, "SpeechParams": SpeechParams, "Path": Path, "image": Image.open(io.BytesIO(png())),
        "frames": [Image.open(io.BytesIO(png())) for _ in range(3)], "state": [0.1, -0.2],
        "samples": recording(7, 1.0),
    }  # fmt: skip
    if served:
        import openai

        space["client"] = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    elif name and not re.search(r"\bLLM\(", code):
        space["llm"] = tiny("")
    for size, smaller in SMALLER.items():
        code = code.replace(size, smaller)
    exec(compile(SERVER.sub(url, with_image(code)), "docs/serve.md", "exec"), space)
