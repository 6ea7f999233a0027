"""The forms of transcriptions and translations: OpenAI's fields, and vLLM's sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fastkernels.engine.http.requests import unserved
from fastkernels.engine.http.requests.protocol import INT64
from fastkernels.engine.sampling.sampling_params import MAX_TEMPERATURE, SamplingParams

LISTS = ("timestamp_granularities",)
STREAMED = ("json", "text")
# {field: values without effect}. An empty value is always accepted.
NEUTRAL: dict[str, tuple[str, ...]] = {
    # OpenAI
    "chunking_strategy": ("auto",), "include": (), "known_speaker_names": (), "known_speaker_references": (),
    "keywords": (), "languages": (), "user": unserved.ANYTHING,
    # vLLM
    "use_beam_search": ("false", "False", "0"), "n": ("1",), "length_penalty": unserved.ANYTHING,
    "hotwords": (),
    "include_stop_str_in_output": unserved.ANYTHING, "to_language": (), "vllm_xargs": ("{}",),
    "watermarking": ("false", "False", "0"),
}  # fmt: skip


class TranslationRequest(BaseModel):
    """The fields of a form without the file; each is a text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = None
    language: str | None = Field(
        None, description="Of the speech, as a code or an English name (default: detected)."
    )
    prompt: str = Field("", description="A text that would come before the audio.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(
        0.0, ge=0, le=MAX_TEMPERATURE, description="0: greedy, and higher for a text that is repetitive or unlikely."
    )  # fmt: skip
    stream: bool = False
    stream_include_usage: bool = Field(
        False, description="vLLM's: the stream ends with an event without a choice that has the tokens."
    )
    stream_continuous_usage_stats: bool = Field(
        False, description="vLLM's: with stream_include_usage, each event has the tokens so far."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT64, description="Of the text of a window; by default half of the model's length."
    )
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @model_validator(mode="after")
    def _streams(self) -> TranslationRequest:
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise unserved.field_error(name, f"{name} may only be set with stream=true")
        if self.stream and self.response_format not in STREAMED:
            raise unserved.field_error(
                "response_format", f"response_format {self.response_format} cannot be streamed: use json or text"
            )  # fmt: skip
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises ValueError."""
        names = (
            "temperature", "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
            "repetition_penalty",
        )  # fmt: skip
        return SamplingParams(**{name: getattr(self, name) for name in names})


class TranscriptionRequest(TranslationRequest):
    timestamp_granularities: list[Literal["segment"]] = Field(
        default_factory=list, description="Of verbose_json, which has segments in any case."
    )

    @field_validator("timestamp_granularities", mode="before")
    @classmethod
    def _segments(cls, given: Any) -> Any:
        if "word" in given:
            raise unserved.field_error(
                "timestamp_granularities",
                "timestamp_granularities: times of words are not supported; use segment",
            )
        return given

    @model_validator(mode="after")
    def _verbose(self) -> TranscriptionRequest:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise unserved.field_error(
                "timestamp_granularities",
                f"timestamp_granularities need response_format verbose_json, got {self.response_format}",
            )
        return self


def fields(form: Iterable[tuple[str, Any]], known: Iterable[str]) -> dict[str, Any]:
    """The supported fields of a form, without the file. Raises PydanticCustomError for other fields."""
    found: dict[str, Any] = {}
    names = set(known)
    for key, value in form:
        name = key.removesuffix("[]")
        if name == "file" or value == "":
            continue
        if not isinstance(value, str):
            raise unserved.field_error(name, f"{name} must be a text, and the form has a file")
        if name in names:
            if name in LISTS:
                found.setdefault(name, []).append(value)
            elif name in found:
                raise unserved.field_error(name, f"{name} is given twice")
            else:
                found[name] = value
        elif name not in NEUTRAL:
            raise unserved.field_error(name, f"unknown field {unserved.shown(name)}")
        elif NEUTRAL[name] is not unserved.ANYTHING and value not in NEUTRAL[name]:
            only = ", ".join(NEUTRAL[name]) or "empty"
            raise unserved.field_error(
                name, f"{name} is not supported: it may be {only}, got {unserved.shown(value)}"
            )
    return found
