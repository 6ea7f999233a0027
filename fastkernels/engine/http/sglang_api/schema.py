"""Schemas of the answers for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, RootModel

from fastkernels.engine.http.answers.schema import answers

TokenLogprobs = list[list[float | int | str | None]]


class MetaInfo(BaseModel):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    input_token_logprobs: TokenLogprobs | None = None
    output_token_logprobs: TokenLogprobs | None = None
    input_top_logprobs: list[TokenLogprobs | None] | None = None
    output_top_logprobs: list[TokenLogprobs] | None = None


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class GeneratedOrList(RootModel[Generated | list[Generated]]):
    """A list for several prompts, or for n above 1."""


class ModelInfo(BaseModel):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    load_format: str
    reasoning_parser: str | None
    tool_call_parser: str | None
    model_type: str | None
    architectures: list[str] | None


class ServerInfo(ModelInfo):
    version: str
    tp_size: int
    max_total_num_tokens: int
    context_length: int
    internal_states: list[Any]


GENERATE = answers(GeneratedOrList, stream=True)
MODEL_INFO, SERVER_INFO = answers(ModelInfo), answers(ServerInfo)
