"""The routes /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import uuid
from functools import partial
from importlib.util import find_spec
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import PydanticCustomError, to_json
from starlette.datastructures import UploadFile

from fastkernels.engine.async_llm import EngineError
from fastkernels.engine.engines.recognition import Options, Recognition, Recognizer
from fastkernels.engine.http.answers.streaming import EventStream, unless_gone
from fastkernels.engine.http.audio_api import answer, schema
from fastkernels.engine.http.audio_api.protocol import TranscriptionRequest, TranslationRequest, fields
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.scheduling.request import RequestOutput
from fastkernels.engine.scheduling.scheduler import QueueFull
from fastkernels.engine.speech import files
from fastkernels.engine.stream import OutputStream

MOST_FIELDS = 64


class Audio:
    """PATHS: (path, method, schema) of the routes."""

    PATHS: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/v1/audio/transcriptions", "transcriptions", schema.TRANSCRIPTION),
        ("/v1/audio/translations", "translations", schema.TRANSLATION),
    )

    def __init__(self, context: Context):
        self.context = context

    async def transcriptions(self, raw: Request) -> Response:
        return await self._answer(raw, "transcribe", TranscriptionRequest)

    async def translations(self, raw: Request) -> Response:
        return await self._answer(raw, "translate", TranslationRequest)

    async def _answer(self, raw: Request, task: str, kind: type[TranslationRequest]) -> Response:
        try:
            recognizer = self.context.llm.engine.recognizer
        except ValueError as error:
            raise ApiError(400, str(error), "model") from error
        body, file = await _form(raw, kind)
        running = None
        try:
            self.context.check_model(body.model)
            running = await self._start(recognizer, body, task, file)
        finally:
            if running is None:
                file.close()
        made = running.recognition.transcript
        if body.stream:
            events = answer.Events(
                made, task, self.context.model_name, body.stream_include_usage, body.stream_continuous_usage_stats
            )  # fmt: skip
            return EventStream(events, running, self.context.config.stall_timeout)  # type: ignore[arg-type]
        try:
            found = await unless_gone(raw, running.rest())
        finally:
            running.close()
        if found is None:
            return Response(status_code=499)
        form = body.response_format
        if form in answer.MEDIA:
            text = made.text + "\n" if form == "text" else answer.subtitles(made.segments, form)
            return Response(text, media_type=answer.MEDIA[form])
        content = answer.body(made, task, recognizer.vocabulary.names, form == "verbose_json")
        return Response(to_json(content), media_type="application/json")

    async def _start(
        self, recognizer: Recognizer, body: TranslationRequest, task: str, file: Any
    ) -> _Running:
        try:
            sampling, most = body.sampling_params(), body.max_completion_tokens
            options = Options(task, body.language, body.prompt, sampling, body.stream, most)
            recording = await self.context.media.run(partial(files.recording, file, recognizer.rate))
            running = _Running(self.context, recognizer.start(recording, options), file)
            await running.start()
        except files.MissingPackage as error:
            raise ApiError(501, f"this server cannot read audio files: {error}", "file") from error
        except files.AudioError as error:
            raise ApiError(400, str(error), "file") from error
        except ValueError as error:
            word = str(error).split(" ", 1)[0]
            raise ApiError(400, str(error), word if word in type(body).model_fields else None) from error
        return running


class _Running:
    """A recognition in the engine: a stream of all the text so far, for EventStream."""

    def __init__(self, context: Context, recognition: Recognition, file: Any):
        self.recognition, self.finished = recognition, False
        self._context, self._file = context, file
        self._outputs: OutputStream | None = None
        self._last: dict[int, RequestOutput] = {}

    async def start(self) -> None:
        """Read the beginning of the file and queue the first requests. Raises AudioError, ValueError and QueueFull."""
        await self._advance(None)

    async def get(self) -> str:
        """Wait for news: all of the text so far. Raises EngineError."""
        try:
            await self._next()
        except (files.AudioError, QueueFull) as error:  # too late for a status
            raise EngineError(str(error)) from error
        if self.finished or not self._last:
            return self.recognition.text_so_far()
        return self.recognition.text_so_far(self._last[0].outputs[0].token_ids if 0 in self._last else ())

    async def rest(self) -> bool:
        """Wait for the end. Raises ApiError, EngineError and QueueFull."""
        try:
            while not self.finished:
                await self._next()
        except files.AudioError as error:
            raise ApiError(400, str(error), "file") from error
        return True

    def close(self) -> None:
        """Abort what still runs. Safe to repeat."""
        if self._outputs is not None:
            self._outputs.close()
        self._file.close()

    async def _next(self) -> None:
        assert self._outputs is not None
        self._last.update(await self._outputs.get())
        if self._outputs.finished:
            await self._advance([self._last[i] for i in sorted(self._last)])

    async def _advance(self, outputs: list[RequestOutput] | None) -> None:
        context, self._last = self._context, {}
        jobs = await context.media.run(partial(self.recognition.advance, outputs))
        if jobs is None:
            self.finished = True
            made = self.recognition.transcript
            context.metrics.count_audio(self.recognition.task, made.duration)
            return
        own = uuid.uuid4().hex
        requests = [
            context.llm.make_request(f"{own}-{i}", job.prompt, job.params) for i, job in enumerate(jobs)
        ]
        self._outputs = await context.open(requests)


async def _form(raw: Request, kind: type[TranslationRequest]) -> tuple[TranslationRequest, Any]:
    """(the fields, the file) of a form. Raises ApiError and RequestValidationError."""
    if find_spec("python_multipart") is None:
        raise ApiError(
            501, "this server cannot read forms: they need the package python-multipart"
            " (pip install 'fastkernels[audio]')",
        )  # fmt: skip
    form = await raw.form(max_files=1, max_fields=MOST_FIELDS)
    file = form.get("file")
    try:
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file is required: an audio file in the form", "file")
        body = kind.model_validate(fields(form.multi_items(), kind.model_fields))
    except PydanticCustomError as error:
        await form.close()
        raise ApiError(400, error.message(), (error.context or {}).get("param")) from error
    except ValidationError as error:
        await form.close()
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error
    except ApiError:
        await form.close()
        raise
    return body, file.file
