"""Images, videos and audio in conversations: the files behind their URLs, and prompts with them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastkernels.core import local_files
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.inputs.images import decode_frames
from fastkernels.engine.inputs.media import PLURALS, MediaPrompt, data_of

FRAMES = "data:video/jpeg;base64,"  # of a video as vLLM has it: image files, separated by commas
WORKERS = 4  # threads that decode and resize
TIMEOUT = 10.0  # seconds of a download
T = TypeVar("T")


def _named(given: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(name, URL) of each medium; the name has its number among those of its kind, from 0 on."""
    counts: Counter[str] = Counter()
    for kind, url in given:
        yield f"{kind} {counts[kind]}", url
        counts[kind] += 1


class MediaPrompts:
    """Makes prompts with media for one engine, in threads of its own."""

    def __init__(self, engine: Any, config: ServerConfig, model_name: str):
        self._engine, self._config, self._model_name = engine, config, model_name
        workers = min(WORKERS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="fastkernels-media")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def placeholders(self) -> Mapping[str, str]:
        """{kind: text that stands for one medium}; {} for a model that reads text only."""
        media = getattr(self._engine, "media", None)
        return {} if media is None else media.model.placeholders

    def check(self, given: Sequence[tuple[str, str]], limit: int | None = None) -> None:
        """Raise ApiError for media that cannot be taken, as far as their number and URLs show.

        given: (kind, URL) of each; limit: of truncate_prompt_tokens
        """
        if not given:
            return
        counts = Counter(kind for kind, _ in given)
        media = getattr(self._engine, "media", None)
        if media is None:
            found = " and ".join(f"{n} {PLURALS[kind]}" for kind, n in counts.items())
            raise ApiError(
                400, f"messages have {found}, and {self._model_name!r} takes text only", "messages"
            )
        if limit is not None:
            named = " and ".join(PLURALS[kind] for kind in counts)
            raise ApiError(
                400,
                f"truncate_prompt_tokens is not possible for a prompt with {named}",
                "truncate_prompt_tokens",
            )
        try:
            for kind, count in counts.items():
                media.limit(kind, count)
            for name, url in _named(given):
                self._check_url(name, url)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error

    async def read(self, ids: list[int], given: Sequence[tuple[str, str]]) -> MediaPrompt:
        """A prompt with these media. Raises ApiError. ids: with a placeholder for each; given: (kind, URL) of each"""
        try:
            return await self.run(partial(self._read, ids, given))
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error

    async def run(self, work: Callable[[], T]) -> T:
        """Do work on media in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _read(self, ids: list[int], given: Sequence[tuple[str, str]]) -> MediaPrompt:
        data: dict[str, list[Any]] = {}
        for (kind, _), (name, url) in zip(given, _named(given), strict=True):
            data.setdefault(kind, []).append(self._medium(kind, name, url))
        return self._engine.read_media(ids, data)

    def _medium(self, kind: str, name: str, url: str) -> Any:
        """The bytes of a file, or the frames of a video of which each is an image file. Raises ValueError."""
        if kind == "video" and url.startswith(FRAMES):
            parts = url.removeprefix(FRAMES).split(",")
            files = [data_of(f"data:image/jpeg;base64,{part}", name) for part in parts]
            try:
                return decode_frames(files)
            except ValueError as error:
                raise ValueError(f"{name} is {error}") from error
        return self._file(name, url)

    def _check_url(self, name: str, url: str) -> None:
        """Raise ValueError for a URL that is neither data, nor of an allowed host, nor of an allowed folder."""
        folder = self._config.allowed_local_media_path
        if url.startswith("data:") or (folder is not None and url.startswith("file:")):
            return
        allowed = self._config.allowed_media_domains
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ValueError(f"{name} cannot be read: {url[:200]!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not allowed:
            only = f"data URLs, and URLs of {', '.join(allowed)}" if allowed else "data URLs only"
            flag = "local-media-path adds a folder" if parts.scheme == "file" else "media-domains adds hosts"
            hint = f" (--allowed-{flag})" if parts.scheme == "file" or not allowed else ""
            raise ValueError(
                f"{name} cannot be read: its URL begins with {url[:32]!r}, and this server reads {only}{hint}"
            )
        if parts.hostname not in allowed:
            raise ValueError(
                f"{name} cannot be read: the host {parts.hostname!r} is not one of {', '.join(allowed)}"
                " (--allowed-media-domains)"
            )

    def _file(self, name: str, url: str) -> bytes:
        if url.startswith("data:"):
            return data_of(url, name)
        folder = self._config.allowed_local_media_path
        if folder is None or not url.startswith("file:"):
            return self._download(name, url)
        try:
            return local_files.below(Path(folder), url, self._config.max_body_size)
        except local_files.FileError as error:
            raise ValueError(f"{name} {error}") from error

    def _download(self, name: str, url: str) -> bytes:
        """The file behind a URL, without redirects, of at most max_body_size bytes. Raises ValueError."""
        import httpx

        most, found = self._config.max_body_size, bytearray()
        try:
            with httpx.stream("GET", url, timeout=TIMEOUT, follow_redirects=False) as answer:
                if answer.status_code != 200:
                    raise ValueError(f"{name} cannot be read: {url[:200]!r} answers {answer.status_code}")
                for part in answer.iter_bytes():
                    found += part
                    if len(found) > most:
                        raise ValueError(f"{name} cannot be read: {url[:200]!r} has more than {most} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{name} cannot be read: {url[:200]!r}: {error}") from error
        return bytes(found)
