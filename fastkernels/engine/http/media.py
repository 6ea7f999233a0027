"""Images in conversations: their content parts, the files behind their URLs, and prompts with them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastkernels.engine.http.config import ServerConfig
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.media import MediaPrompt, data_of

WORKERS = 4  # threads that decode and resize
TIMEOUT = 10.0  # seconds of a download
T = TypeVar("T")


class MediaPrompts:
    """Makes prompts with images for one engine, in threads of its own."""

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

    def check(self, urls: Sequence[str], limit: int | None = None) -> None:
        """Raise ApiError for images that cannot be taken, as far as their number and URLs show.

        limit: of truncate_prompt_tokens
        """
        if not urls:
            return
        media = getattr(self._engine, "media", None)
        if media is None:
            raise ApiError(
                400, f"messages have {len(urls)} images, and {self._model_name!r} takes text only", "messages"
            )
        if limit is not None:
            raise ApiError(
                400,
                "truncate_prompt_tokens is not possible for a prompt with images",
                "truncate_prompt_tokens",
            )
        try:
            media.limit("image", len(urls))
            for i, url in enumerate(urls):
                self._check_url(i, url)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error

    async def read(self, ids: list[int], urls: Sequence[str]) -> MediaPrompt:
        """A prompt with the images behind these URLs. Raises ApiError. ids: with a placeholder for each."""
        try:
            return await self.run(partial(self._read, ids, urls))
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error

    async def run(self, work: Callable[[], T]) -> T:
        """Do work on media in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _read(self, ids: list[int], urls: Sequence[str]) -> MediaPrompt:
        files = [self._file(i, url) for i, url in enumerate(urls)]
        return self._engine.read_media(ids, {"image": files})

    def _check_url(self, i: int, url: str) -> None:
        """Raise ValueError for a URL that is neither data nor of an allowed host."""
        if url.startswith("data:"):
            return
        allowed = self._config.allowed_media_domains
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not allowed:
            only = f"data URLs, and URLs of {', '.join(allowed)}" if allowed else "data URLs only"
            raise ValueError(
                f"image {i} cannot be read: its URL begins with {url[:32]!r}, and this server reads {only}"
                f"{'' if allowed else ' (--allowed-media-domains adds hosts)'}"
            )
        if parts.hostname not in allowed:
            raise ValueError(
                f"image {i} cannot be read: the host {parts.hostname!r} is not one of {', '.join(allowed)}"
                " (--allowed-media-domains)"
            )

    def _file(self, i: int, url: str) -> bytes:
        return data_of(url, i) if url.startswith("data:") else self._download(i, url)

    def _download(self, i: int, url: str) -> bytes:
        """The file behind a URL, without redirects, of at most max_body_size bytes. Raises ValueError."""
        import httpx

        most, found = self._config.max_body_size, bytearray()
        try:
            with httpx.stream("GET", url, timeout=TIMEOUT, follow_redirects=False) as answer:
                if answer.status_code != 200:
                    raise ValueError(f"image {i} cannot be read: {url[:200]!r} answers {answer.status_code}")
                for part in answer.iter_bytes():
                    found += part
                    if len(found) > most:
                        raise ValueError(
                            f"image {i} cannot be read: {url[:200]!r} has more than {most} bytes"
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"image {i} cannot be read: {url[:200]!r}: {error}") from error
        return bytes(found)
