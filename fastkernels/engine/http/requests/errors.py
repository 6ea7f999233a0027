"""Error answers in OpenAI's form: the problem, the field, and the allowed values."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.http.requests.protocol import FIELDS
from fastkernels.engine.http.requests.unserved import shown
from fastkernels.engine.scheduling.scheduler import QueueFull
from fastkernels.engine.structured.bodies import renamed

log = logging.getLogger("fastkernels")
ANTHROPIC = "/v1/messages"
RETRY_AFTER = 1  # seconds, about the time until a full queue has room again
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip
# By type of error, where pydantic's own words are Python's
_MESSAGES = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a JSON object"),
    "list_type": "must be a list",
}
_BEGINNINGS = ("Input should be ", "must be ")


class ApiError(HTTPException):
    """An error with an HTTP status. param: the request's field with the error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(status, message, headers)
        self.param = param


def error_body(message: str, status: int, param: str | None = None, path: str = "") -> dict[str, Any]:
    """The body of an error in OpenAI's form, or in Anthropic's for a path of that API."""
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": {"type": TYPES.get(status, "api_error"), "message": message}}
    kind = TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(error: Exception, path: str = "") -> JSONResponse:
    """The response to a request for this path that ended with an exception."""
    status, headers = _status(error)
    message = str(error.detail) if isinstance(error, StarletteHTTPException) else str(error)
    return JSONResponse(error_body(message, status, getattr(error, "param", None), path), status, headers)


def refused(error: ValueError, body: Any = None) -> ApiError:
    """A 400 for a ValueError of SamplingParams or the engine, whose message begins with the field.

    body: the request, which may spell structured_outputs by another field.
    """
    message = str(error) if body is None else renamed(str(error), body)
    word = message.replace("the prompt", "prompt", 1).split(" ", 1)[0].rstrip(":,")
    return ApiError(400, message, word if word in FIELDS else None)


def _status(error: Exception) -> tuple[int, dict[str, str]]:
    if isinstance(error, StarletteHTTPException):
        return error.status_code, dict(error.headers or {})
    if isinstance(error, QueueFull):
        return 429, {"Retry-After": str(RETRY_AFTER)}
    if isinstance(error, EngineError) and error.stopped:
        return 503, {"Retry-After": str(RETRY_AFTER)}
    return 500, {}


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _gone)
    for kind in (StarletteHTTPException, QueueFull, EngineError, Exception):
        app.add_exception_handler(kind, _failed)


async def _failed(raw: Request, error: Exception) -> JSONResponse:
    answer = error_response(error, raw.url.path)
    if answer.status_code >= 500 and answer.status_code != 503:
        log.error("%s %s: %s", raw.method, raw.url.path, error, exc_info=error)
    return answer


async def _gone(raw: Request, error: Exception) -> Response:
    """The client has left while a route read its body."""
    return Response(status_code=499)


async def _invalid(raw: Request, error: Any) -> JSONResponse:
    message, param = describe(error.errors(), error.body)
    return JSONResponse(error_body(message, 400, param, raw.url.path), 400)


def describe(errors: Sequence[dict[str, Any]], body: Any) -> tuple[str, str | None]:
    """(message, field) of pydantic's errors; the message has the field, the allowed values and the given one.

    body: the request's JSON, or None if only the errors are known. If none of a field's types fits, the message names
    those that come closest.
    """
    error, loc = errors[0], _place(errors[0], body)
    if "param" in error.get("ctx", {}):  # made by unserved.field_error, with a complete message
        return str(error["msg"]), error["ctx"]["param"]
    same = [(_place(e, body), e) for e in errors if loc and _place(e, body)[:1] == loc[:1]]
    of_union = len(loc) < sum(part != "[key]" for part in error["loc"][1:])
    if of_union and same:  # pydantic has an error for each of the types
        deepest = max(len(place) for place, _ in same)
        loc = next(place for place, _ in same if len(place) == deepest)
        same = [(place, e) for place, e in same if place == loc]
        error = same[0][1]
    else:
        same = [(loc, error)]
    where = ""
    for part in loc:
        where += f"[{part}]" if isinstance(part, int) else f".{part}" if where else str(part)
    if error["type"] == "missing":
        return (
            f"{where} is required" if where else "the body is empty: it must be a JSON object"
        ), where or None
    message = _joined([_words(e) for _, e in same])
    given = shown(error.get("input"))
    if error["type"] == "too_long":
        given = str(len(error["input"]))
    return f"{where or 'the body'}: {message}, got {given}", where or None


def _words(error: dict[str, Any]) -> str:
    if error["type"] == "too_long":
        return f"may have {error['ctx']['max_length']} entries"
    if error["type"] == "too_short":
        least = error["ctx"]["min_length"]
        return f"must have at least {least} {'entry' if least == 1 else 'entries'}"
    return _MESSAGES.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")


def _joined(messages: Sequence[str]) -> str:
    """'must be a list, or a JSON object' of several messages."""
    first, *others = dict.fromkeys(messages)
    begin = next((words for words in _BEGINNINGS if first.startswith(words)), "")
    return ", or ".join([first, *(other.removeprefix(begin) for other in others)])


def _place(error: dict[str, Any], body: Any) -> tuple[str | int, ...]:
    """Where the error is in the body, without pydantic's names of types; without a body, pydantic's own place."""
    parts, found = error["loc"][1:], list[str | int]()
    if body is None:
        return tuple(part for part in parts if part != "[key]")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1 and error["type"] == "missing"
        if isinstance(body, Mapping) and (part in body or last):
            body = body.get(part)
        elif isinstance(body, Sequence) and isinstance(part, int):
            body = body[part] if part < len(body) else None
        else:
            continue
        found.append(part)
    return tuple(found)
