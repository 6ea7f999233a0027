"""Bodies of requests to /generate."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema, WrapValidator, model_validator

from fastkernels.engine.http.requests import unserved
from fastkernels.engine.http.requests.protocol import (
    INT64,
    MAX_N,
    MAX_PROMPTS,
    Body,
    CacheSalt,
    Stop,
    Strict,
    TokenId,
)
from fastkernels.engine.http.requests.unserved import field_error
from fastkernels.engine.sampling.sampling_params import MAX_TEMPERATURE

DEFAULT_TOKENS = 128  # SGLang's max_new_tokens


def _text(value: Any) -> list[str] | str | None:
    """One text or several."""
    texts = value if isinstance(value, list) else [value]
    if value is not None and not (texts and all(isinstance(t, str) and t for t in texts)):
        raise ValueError("must be a text or a list of texts, not empty")
    if len(texts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} texts are allowed, got {len(texts)}")
    return value


_ONE = {"type": "string", "minLength": 1}
_TEXT = {
    "anyOf": [
        _ONE,
        {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "null"},
    ]
}


def _input_ids(value: Any) -> Any:
    """Token ids of one prompt or of several."""
    if value is None:
        return None
    prompts = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for ids in prompts:
        if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise ValueError("must be a list of token ids, not empty, or a list of such lists")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed, got {len(prompts)}")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUT_IDS = {
    "anyOf": [
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "null"},
    ]
}


class SglangSampling(Strict):
    """SGLang's sampling parameters."""

    max_new_tokens: int | None = Field(None, ge=1, le=INT64, description=f"Default: {DEFAULT_TOKENS}.")
    min_new_tokens: int | None = Field(0, ge=0, le=INT64)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    sampling_seed: int | None = Field(None, ge=-(2**63), le=INT64)
    n: int | None = Field(1, ge=1, le=MAX_N)
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        return unserved.check_and_drop(data, cls.model_fields)


def _one_or_list(value: Any, _: Any) -> Any:
    """Validate without pydantic's union, whose errors have a type's name in their place."""
    if isinstance(value, list):
        return _MANY.validate_python(value)
    return None if value is None else SglangSampling.model_validate(value)


_MANY = TypeAdapter(list[SglangSampling])
SamplingParams = Annotated[SglangSampling | list[SglangSampling] | None, WrapValidator(_one_or_list)]


class SglangRequest(Body):
    """One prompt or several, as text or as token ids."""

    text: Annotated[Any, PlainValidator(_text), WithJsonSchema(_TEXT)] = None
    input_ids: Annotated[Any, PlainValidator(_input_ids), WithJsonSchema(_INPUT_IDS)] = None
    sampling_params: SamplingParams = Field(
        None, description="A list has one entry for each prompt, all with the same n."
    )
    cache_salt: CacheSalt = None
    extra_key: CacheSalt = None
    stream: bool | None = False
    return_logprob: bool | None = False
    logprob_start_len: int | None = Field(-1, ge=-1, description="-1: no log-probabilities of the prompt.")
    top_logprobs_num: int | None = Field(0, ge=0)
    return_text_in_logprobs: bool | None = False
    rid: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    @model_validator(mode="after")
    def _consistent(self) -> SglangRequest:
        if (self.text is None) == (self.input_ids is None):
            raise field_error("text", "give either text or input_ids")
        if self.stream and self.return_logprob and (self.logprob_start_len or 0) >= 0:
            raise field_error("logprob_start_len", "logprob_start_len must be -1 with stream=true")
        return self

    @model_validator(mode="after")
    def _one_for_each_prompt(self) -> SglangRequest:
        given, prompts = self.sampling_params, len(self.prompts)
        if isinstance(given, list):
            if len(given) != prompts:
                raise field_error(
                    "sampling_params", f"sampling_params has {len(given)} entries for {prompts} prompts"
                )
            if len({params.n or 1 for params in given}) > 1:
                raise field_error("sampling_params", "sampling_params: n must be the same in all entries")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.text is not None else self.input_ids
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        given: Any = self.text if self.text is not None else self.input_ids
        several = isinstance(given, list) and not isinstance(given[0], int)
        params = self.sampling_params[0] if isinstance(self.sampling_params, list) else self.sampling_params
        return several or (params is not None and (params.n or 1) > 1)
