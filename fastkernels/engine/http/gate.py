"""Checks every HTTP request first: shutdown, API key, limits of the body, and the origin of a browser's page (CORS)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Callable, Collection
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.requests.errors import ApiError, error_response

# no key required, and answered during shutdown
OPEN = frozenset({"/health", "/ping", "/version", "/metrics", "/load"})
# all others take JSON
FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"})
EITHER = frozenset({"/v1/videos"})  # which take forms, too
MAX_ID = 256  # bytes of a client's X-Request-Id
BODY_TIMEOUT = 60.0  # seconds to wait for the next part of a body


class Gate:
    """ASGI middleware.

    active      requests in progress, without those to OPEN paths
    load        those to `model_paths`, which run the model
    refusal()   the reason why requests are refused; None: they are accepted
    """

    def __init__(
        self,
        app: Any,
        config: ServerConfig,
        refusal: Callable[[], str | None],
        model_paths: Collection[str] = (),
    ):
        self.app, self.max_body_size, self.refusal = app, config.max_body_size, refusal
        self._key = _digest(config.api_key) if config.api_key else None
        self.model_paths = frozenset(model_paths)
        self._paths = {
            route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())
        }
        self.active = self.load = 0
        self._entry: Any = self._check_and_pass
        if (
            config.allowed_origins
        ):  # outermost: browsers send no key before they may, and must be able to read errors
            self._entry = CORSMiddleware(
                self._check_and_pass, config.allowed_origins, config.allowed_methods, config.allowed_headers,
                config.allow_credentials,
            )  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._entry(scope, receive, send)
            return
        request_id = dict(scope["headers"]).get(b"x-request-id", b"")[:MAX_ID]
        if not request_id:
            request_id = uuid.uuid4().hex.encode()
            scope["headers"] = [*scope["headers"], (b"x-request-id", request_id)]

        async def identified(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        await self._entry(scope, receive, identified)

    async def _check_and_pass(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        runs_model = scope["path"] in self.model_paths
        self.active += 1
        self.load += runs_model
        try:
            self._check(scope)
            await self.app(scope, self._limited(receive), send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        finally:
            self.active -= 1
            self.load -= runs_model

    def _check(self, scope: Any) -> None:
        reason = self.refusal()
        if reason is not None:
            raise ApiError(503, reason, headers={"Retry-After": "1", "Connection": "close"})
        headers = dict(scope["headers"])
        given = headers.get(b"authorization")
        if given is None:  # Anthropic's header
            given = b"Bearer " + headers.get(b"x-api-key", b"")
        if self._key is not None and not self._authorized(given):
            raise ApiError(401, "wrong or missing API key: send it as Authorization: Bearer KEY")
        if scope["method"] != "POST":
            return
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if scope["path"] in FORMS:
            if kind != b"multipart/form-data":
                raise ApiError(
                    415, f"content-type must be multipart/form-data, not {kind.decode('latin-1')!r}"
                )
        elif not kind:
            kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*kept, (b"content-type", b"application/json")]
        elif kind != b"application/json" and not (
            kind == b"multipart/form-data" and (scope["path"] in EITHER or scope["path"] not in self._paths)
        ):  # a form for an unknown path is answered with 404 or 405
            raise ApiError(415, f"content-type must be application/json, not {kind.decode('latin-1')!r}")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_size:
            raise self._too_large(int(length))

    def _authorized(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        assert self._key is not None
        return (
            hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._key)
            and scheme.lower() == b"bearer"
        )

    def _too_large(self, size: int) -> ApiError:
        # The rest of the body is not read, so the connection cannot be reused.
        return ApiError(
            413, f"the body has at least {size} bytes; the limit is {self.max_body_size} (--max-body-size)",
            headers={"Connection": "close"},
        )  # fmt: skip

    def _limited(self, receive: Any) -> Any:
        """Wrap `receive` to limit the size of the body and the time to wait for it."""
        size, reading = 0, True

        async def counted() -> Any:
            nonlocal size, reading
            if not reading:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_TIMEOUT)
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"the body did not arrive: nothing for {BODY_TIMEOUT:g} seconds",
                    headers={"Connection": "close"},
                ) from None
            size += len(message.get("body", b""))
            reading = message["type"] == "http.request" and message.get("more_body", False)
            if size > self.max_body_size:
                raise self._too_large(size)
            return message

        return counted


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
