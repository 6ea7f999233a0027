"""The routes /v1/audio/speech and /v1/audio/voices: a text as sound, streamed as it is made."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.responses import event
from fastkernels.engine.http.answers.streaming import EventStream
from fastkernels.engine.http.requests.errors import ApiError, error_body
from fastkernels.engine.http.requests.protocol import INT64, Body
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.http.routes.embeddings import results
from fastkernels.engine.scheduling.speaking import FASTEST, SLOWEST, SpeechOutput, SpeechParams
from fastkernels.engine.speech.encoding import FORMATS, Encoder
from fastkernels.engine.speech.files import MissingPackage

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
TEXT = "text"  # the engine's name of the field `input`


class VoiceId(BaseModel):
    id: str


class SpeechBody(Body):
    """OpenAI's fields, and `stream`, `temperature`, `seed` and `priority`."""

    input: str = Field(description="The text to speak, of at most the server's --max-characters.")
    voice: str | VoiceId | None = Field(
        None, description="One of GET /v1/audio/voices (default: the only one)."
    )
    instructions: str | None = Field(None, description="How to speak.")
    response_format: Format | None = "mp3"
    speed: float | None = Field(
        1.0, ge=SLOWEST, le=FASTEST, description="Other speeds than 1 are not streamed within a part."
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        "audio", description="The file, or events with its bytes in base64, which are streamed."
    )
    stream: bool | None = Field(
        False, description="Send sound while its sentence is still made, instead of whole parts of the text."
    )
    temperature: float | None = Field(1.0, ge=0, le=2)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")


class NamedVoice(BaseModel):
    id: str
    text: str


class VoiceList(BaseModel):
    object: Literal["list"]
    data: list[NamedVoice]


def _files() -> dict[str, Any]:
    """Keyword arguments of the route: a file of any format, or events."""
    made = schema.answers(VoiceList, stream=True)
    made["responses"][200].pop("model")
    content = {media: {"schema": {"type": "string", "format": "binary"}} for media, *_ in FORMATS.values()}
    made["responses"][200]["content"] |= content
    return made


class Speech:
    """PATHS, GET_PATHS: (path, method, schema) of the routes."""

    PATHS = (("/v1/audio/speech", "speech", _files()),)
    GET_PATHS = (("/v1/audio/voices", "voices", schema.answers(VoiceList)),)

    def __init__(self, context: Context):
        self.context = context

    async def voices(self) -> dict[str, Any]:
        found = self.context.llm.engine.voices.values()
        return {"object": "list", "data": [{"id": v.name, "text": v.text} for v in found]}

    async def speech(self, body: SpeechBody, raw: Request) -> Response:
        """A file with the sound, or its events. Files are sent as they are made."""
        context, kind = self.context, body.response_format or "mp3"
        context.check_model(body.model)
        events = body.stream_format == "sse"
        voice = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
        try:
            params = SpeechParams(
                voice, _or(body.speed, 1.0), bool(body.stream) or events, body.instructions,
                _or(body.temperature, 1.0), body.seed,
            )  # fmt: skip
            # A long text is split and encoded
            request = await asyncio.to_thread(
                context.llm.make_request, f"speech-{uuid.uuid4().hex}", body.input, params, body.priority or 0
            )
        except ValueError as error:
            field, _, rest = str(error).partition(" ")
            field = "input" if field == TEXT else field
            raise ApiError(
                400, f"{field} {rest}", field if field in SpeechBody.model_fields else None
            ) from error
        if events or body.stream or len(request.parts) > 1:
            encoder = self._encoder(kind, None)
            outputs = await context.open([request])
            answer = _Events(encoder) if events else _Bytes(encoder)
            media = "" if events else FORMATS[kind][0]
            return EventStream(answer, outputs, context.config.stall_timeout, media)
        self._encoder(kind, 0)  # an error comes before the work
        found = await results(context, [request], raw)
        if found is None:
            return Response(status_code=499)
        file = await asyncio.to_thread(found[0].file, kind)
        return Response(file, media_type=FORMATS[kind][0])

    def _encoder(self, kind: str, samples: int | None) -> Encoder:
        try:
            return Encoder(kind, self.context.llm.engine.rate, samples)
        except MissingPackage as error:
            raise ApiError(501, f"this server cannot encode {error}", "response_format") from error


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class _Bytes:
    """The bytes of a file, for EventStream."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder

    def opening(self) -> bytes:
        return b""

    async def events(self, outputs: Sequence[tuple[int, SpeechOutput]]) -> bytes:
        return await asyncio.to_thread(self._encoded, [output.samples for _, output in outputs])

    def _encoded(self, sounds: Sequence[Any]) -> bytes:
        return b"".join(map(self.encoder.encode, sounds))

    def closing(self) -> bytes:
        return self.encoder.close()

    def failed(self, message: str, status: int) -> bytes | None:
        """None: a file cannot tell, so the connection is closed."""
        return None


class _Events(_Bytes):
    """OpenAI's events: `speech.audio.delta` with bytes of the file in base64, and `speech.audio.done`."""

    def __init__(self, encoder: Encoder):
        super().__init__(encoder)
        self._last: SpeechOutput | None = None

    async def events(self, outputs: Sequence[tuple[int, SpeechOutput]]) -> bytes:
        self._last = outputs[-1][1]
        return _delta(await super().events(outputs))

    def closing(self) -> bytes:
        last = self._last
        read, made = (0, 0) if last is None else (last.num_prompt_tokens, last.num_generated_tokens)
        usage = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
        return _delta(self.encoder.close()) + event({"type": "speech.audio.done", "usage": usage})

    def failed(self, message: str, status: int) -> bytes:
        return event(error_body(message, status))


def _delta(data: bytes) -> bytes:
    return event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}) if data else b""
