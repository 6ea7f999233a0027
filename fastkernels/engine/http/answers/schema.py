"""Schemas of the answers for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs = None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Classification(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


class Pooled(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class SampleScores(BaseModel):
    index: int
    object: Literal["scores"]
    scores: list[float]
    items: list[int] | None = None


class SampleScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[SampleScores]
    usage: EmbeddingUsage


class Segmented(BaseModel):
    index: int
    object: Literal["segmentation"]
    labels: list[int] | None = None
    data: list[list[float]] | str | None = None


class SegmentationList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Segmented]
    usage: EmbeddingUsage


class ScoreList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankDocument(BaseModel):
    text: str
    multi_modal: None


class RerankResult(BaseModel):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankList(BaseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class Load(BaseModel):
    server_load: int


class TokenizerInfo(BaseModel):
    model_config = {"extra": "allow"}

    tokenizer_class: str


class Done(BaseModel):
    success: bool


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": model, "description": "The problem, the field, and the allowed values"},
        "5XX": {"model": model, "description": "The engine failed, has ended, or is shutting down"},
    }


_ERRORS = _errors(ErrorResponse)


_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def answers(
    model: type[BaseModel], stream: bool = False, error: type[BaseModel] = ErrorResponse
) -> dict[str, Any]:
    """Keyword arguments of a route with this answer, and with a stream of server-sent events if `stream`."""
    ok: dict[str, Any] = {"model": model, "description": "The answer"}
    if stream:
        ok["content"] = {"text/event-stream": {"schema": _EVENT}}
    return {"responses": {200: ok, **_errors(error)}}


def _text(description: str, media: str | None) -> dict[str, Any]:
    from fastapi.responses import Response

    ok = {
        "description": description,
        **({"content": {media: {"schema": {"type": "string"}}}} if media else {}),
    }
    return {"responses": {200: ok, **_ERRORS}, "response_class": Response}


EMPTY = _text("Requests are taken", None)
METRICS = _text("Prometheus' text format", "text/plain")
VERSION, MODELS, MODEL = answers(Version), answers(ModelList), answers(ModelCard)
LOAD, TOKENIZER_INFO = answers(Load), answers(TokenizerInfo)
COMPLETION = answers(Completion, stream=True)
CHAT = answers(ChatCompletion, stream=True)
EMBEDDINGS, CLASSIFICATION = answers(EmbeddingList), answers(ClassificationList)
POOLING, SCORES, RERANKING = answers(PoolingList), answers(ScoreList), answers(RerankList)
RECOMMENDATION, SEGMENTATION = answers(SampleScoreList), answers(SegmentationList)
TOKENIZE, DETOKENIZE, DONE = answers(Tokens), answers(Text), answers(Done)
