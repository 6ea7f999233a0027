"""Schemas of transcriptions and translations for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from fastkernels.engine.engines.recognition import Segment
from fastkernels.engine.http.answers.schema import answers
from fastkernels.engine.http.audio_api.protocol import LISTS, TranscriptionRequest, TranslationRequest


class Duration(BaseModel):
    type: Literal["duration"]
    seconds: int


class Text(BaseModel):
    text: str
    usage: Duration


class VerboseText(Text):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    segments: list[Segment]


def _route(form: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments of a route that reads a form with a file."""
    found = form.model_json_schema()
    properties = {f"{n}[]" if n in LISTS else n: field for n, field in found["properties"].items()}
    file = {"type": "string", "format": "binary", "description": "The audio file."}
    body = {"type": "object", "required": ["file"], "properties": {"file": file, **properties}}
    made = answers(Text, stream=True)
    made["responses"][200] |= {"model": Text | VerboseText}
    made["responses"][200]["content"]["text/plain"] = {"schema": {"type": "string"}}
    content = {"multipart/form-data": {"schema": {**body, "additionalProperties": False}}}
    return {**made, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


TRANSCRIPTION, TRANSLATION = _route(TranscriptionRequest), _route(TranslationRequest)
