"""Media that are files of the server's machine: only regular ones of one folder, and paths in Python calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.live import live_server
from support.tiny import IMAGE, make_tiny_vlm

from fastkernels import LLM, SamplingParams
from fastkernels.core import local_files
from fastkernels.engine.http.requests.config import ServerConfig

MOST = 1 << 16
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("model") / "qwen2_vl", "qwen2_vl")


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image, next to a secret, and ways that lead out of it."""
    from PIL import Image

    top = tmp_path_factory.mktemp("files")
    made = top / "media"
    (made / "more").mkdir(parents=True)
    image = Image.new("RGB", (56, 28), (200, 10, 30))
    image.save(made / "more" / "a cat.png")
    image.save(top / "secret.png")
    (made / "link.png").symlink_to(top / "secret.png")
    (made / "out").symlink_to(top)
    (made / "large.png").write_bytes(bytes(MOST + 1))
    os.mkfifo(made / "fifo.png")
    return made


@pytest.fixture(scope="module")
def url(folder: Path, media: Path) -> Iterator[str]:
    config = ServerConfig("tiny", allowed_local_media_path=str(media), max_body_size=MOST)
    with live_server(folder, config, max_model_len=256) as (url, _):
        yield url


def ask(url: str, of: str) -> httpx.Response:
    content = [{"type": "image_url", "image_url": {"url": of}}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=60)


def test_file_of_the_folder_is_read(url: str, media: Path, folder: Path) -> None:
    path = media / "more" / "a cat.png"
    served = ask(url, path.as_uri()).json()["choices"][0]["message"]["content"]
    with LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100) as llm:
        content = [{"type": "image_url", "image_url": {"url": path.as_uri()}}]
        chat = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)

        def text(image: object) -> str:
            given = {"prompt": f"a {IMAGE}", "multi_modal_data": {"image": image}}
            return llm.generate(given, PARAMS, use_tqdm=False)[0].outputs[0].text

        assert text(path) == text(str(path)) == text(path.read_bytes())
        with pytest.raises(
            ValueError, match=r"image 0 of the prompt cannot be read: .*is not a regular file"
        ):
            text(media / "fifo.png")
    assert served == chat[0].outputs[0].text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{media}/../secret.png", "is not in the folder"),
        ("{media}/%2e%2e/secret.png", "is not in the folder"),
        ("{top}/secret.png", "is not in the folder"),
        ("{media}", "is not in the folder"),
        ("//elsewhere{media}/more/a cat.png", "is not in the folder"),
        ("{media}/link.png", "it is a symbolic link"),
        ("{media}/out/secret.png", "Not a directory|it is a symbolic link"),
        ("{media}/fifo.png", "is not a regular file"),
        ("{media}/more", "is not a regular file"),
        ("{media}/none.png", "No such file or directory"),
        ("{media}/a%00b.png", "it has a null byte"),
        ("{media}/large.png", f"has {MOST + 1} bytes, and at most {MOST} are possible"),
    ],
)
def test_ways_out_of_the_folder_are_refused(url: str, media: Path, path: str, message: str) -> None:
    answer = ask(url, "file://" + path.format(media=media, top=media.parent).removeprefix("//"))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith("image 0 cannot be read: ")
    assert any(word in error["message"] for word in message.split("|")), error


def test_files_are_refused_by_default(folder: Path, media: Path) -> None:
    with live_server(folder, ServerConfig("tiny"), max_model_len=256) as (url, _):
        answer = ask(url, (media / "more" / "a cat.png").as_uri())
    assert answer.status_code == 400 and "(--allowed-local-media-path adds a folder)" in answer.text


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allowed_local_media_path .* is not a folder"):
        ServerConfig(allowed_local_media_path=str(tmp_path / "none"))


def test_size_is_checked_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # more than the memory
    with pytest.raises(
        local_files.FileError, match="has 1099511627776 bytes, and at most 2147483648 are possible"
    ):
        local_files.read(path)
