"""Bodies of requests: OpenAI's completions, chat completions and embeddings with vLLM's extensions, and tokenize.

Validation is strict: a string or boolean instead of a number is an error, and so is an unknown field.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from fastkernels.engine.http.requests import unserved
from fastkernels.engine.http.requests.messages import IMAGE_FORM, Message, check_content
from fastkernels.engine.http.requests.unserved import field_error
from fastkernels.engine.sampling.sampling_params import MAX_TEMPERATURE, RequestOutputKind, SamplingParams
from fastkernels.engine.sampling.unmask_params import MAX_GUIDANCE, OWN, UnmaskParams
from fastkernels.engine.structured.bodies import (
    ResponseFormat,
    StructuredOutputs,
    TextOrObject,
    structured_outputs,
)

MAX_N = 128
MAX_PROMPTS = 1024
MAX_INPUTS = 2048  # of an encoder, as OpenAI's; texts that are scored
MAX_STOP = 128
INT64 = 2**63 - 1

CacheSalt = Annotated[
    str | None,
    Field(min_length=1, max_length=1024, description="Cached prefixes are shared only with the same salt."),
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be -1 or at least 1")
    return value


TruncatePrompt = Annotated[
    int | None,
    Field(
        ge=-1,
        le=INT64,
        description="Use this number of the prompt's tokens, if it has more; -1: as many as fit, with the output.",
    ),
    AfterValidator(_not_zero),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": INT64}, {"const": -1}, {"type": "null"}]}
    ),
]
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
VIDEO_FORM = '{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME,..."}}'
FORMS = {"image_url": IMAGE_FORM, "video_url": VIDEO_FORM}
_TEXT = {"type": "string", "minLength": 1}


def _prompt(value: Any) -> str | list[Any]:
    return _one_or_more(value, MAX_PROMPTS)


def _one_or_more(value: Any, most: int) -> str | list[Any]:
    """One prompt or a list of prompts. Checked by hand for better messages than those of a union type."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text or a list of token ids, not empty, or a list of such prompts")
    if type(value[0]) is int:
        _token_ids(value, "it")
        return value
    if len(value) > most:
        raise ValueError(f"at most {most} entries are allowed, got {len(value)}")
    for i, prompt in enumerate(value):
        if type(prompt) is not type(value[0]) or not isinstance(prompt, (str, list)):
            raise ValueError(f"entry {i} differs in type: a list holds either texts or lists of token ids")
        if not prompt:
            raise ValueError(f"entry {i} of the list is empty")
        if isinstance(prompt, list):
            _token_ids(prompt, f"entry {i}")
    return value


def _input(value: Any) -> Any:
    """The input of an encoder: as _one_or_more, one image or video, or a list of these."""
    if isinstance(value, dict):
        return _visual(value, "it")
    if not value or not isinstance(value, (str, list)):
        raise ValueError(
            f"must be texts or lists of token ids, not empty, or images, one or a list: {IMAGE_FORM}, or videos:"
            f" {VIDEO_FORM}"
        )
    if isinstance(value, str) or not isinstance(value[0], dict):
        return _one_or_more(value, MAX_INPUTS)
    if len(value) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS} entries are allowed, got {len(value)}")
    return [_visual(part, f"entry {i}") for i, part in enumerate(value)]


def _visual(part: Any, name: str) -> dict[str, Any]:
    """A content part with an image or a video. OpenAI's `detail` has no effect: the model has one resolution."""
    kind = part.get("type") if isinstance(part, dict) else None
    given = part.get(kind) if isinstance(kind, str) and kind in FORMS else None
    if not isinstance(given, dict) or not isinstance(given.get("url"), str) or set(given) - {"url", "detail"}:
        raise ValueError(f"{name} must be an image: {IMAGE_FORM}, or a video: {VIDEO_FORM}")
    return part


def _visual_of(messages: Any) -> dict[str, Any]:
    """The only content part of a conversation, which must be an image or a video."""
    contents = (
        [m.get("content") if isinstance(m, dict) else None for m in messages]
        if isinstance(messages, list)
        else []
    )
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    try:
        (part,) = parts
        return _visual(part, "it")
    except ValueError as error:
        raise field_error(
            "messages", "must hold one content part of type image_url or video_url, and nothing else"
        ) from error


def _token_ids(ids: list[Any], name: str) -> None:
    if set(map(type, ids)) != {int} or min(ids) < 0:
        raise ValueError(f"{name} must hold token ids only: integers of at least 0")


def _no_echo(value: Any) -> bool | None:
    if value is not None and value is not False:  # 0 is equal to False
        raise ValueError("is not supported for chat completions")
    return value


_NO_ECHO = {"anyOf": [{"type": "boolean", "const": False}, {"type": "null"}], "default": False}


def _stop(value: Any) -> list[str] | None:
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and 0 < len(s) <= 1024 for s in strings):
        raise ValueError("must be a string, or a list of strings, of 1 to 1024 characters each")
    if len(strings) > MAX_STOP:
        raise ValueError(f"at most {MAX_STOP} strings are allowed, got {len(strings)}")
    return strings


def _array(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": 1024}
_STOP_SCHEMA = {"anyOf": [_STOP_STRING, _array(_STOP_STRING, MAX_STOP), {"type": "null"}]}
Stop = Annotated[Any, PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)]
_PROMPT_SCHEMA = {"anyOf": [_TEXT, _TOKENS, _array(_TEXT, MAX_PROMPTS, 1), _array(_TOKENS, MAX_PROMPTS, 1)]}
_INPUTS = [_TEXT, _TOKENS, _array(_TEXT, MAX_INPUTS, 1), _array(_TOKENS, MAX_INPUTS, 1)]
_VISUAL = [
    {
        "type": "object", "required": ["type", kind],
        "properties": {
            "type": {"const": kind},
            kind: {
                "type": "object", "required": ["url"], "additionalProperties": False,
                "properties": {"url": {"type": "string"}, "detail": {}},
            },
        },
    }
    for kind in FORMS
]  # fmt: skip
_INPUT_SCHEMA = {"anyOf": [*_INPUTS, *_VISUAL, _array({"anyOf": _VISUAL}, MAX_INPUTS, 1)]}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Body(Strict):
    """The body of a request: a JSON object. Unsupported fields must have a value without effect (unserved.py)."""

    model_config = ConfigDict(json_schema_extra=unserved.add_to_schema)

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        return unserved.check_and_drop(data, cls.model_fields)


class StreamOptions(Strict):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False  # OpenAI's option, without effect


class GenerationRequest(Body):
    """Common fields of completions and chat completions."""

    PARAMS: ClassVar[type[SamplingParams]] = SamplingParams
    OF_PARAMS: ClassVar[tuple[str, ...]] = ()  # fields of PARAMS beyond those of SamplingParams

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Must equal n.")
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    seed: int | None = Field(None, ge=-(2**63), le=INT64)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024, description="Token id to a value added to its logit.")
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    min_tokens: int | None = Field(0, ge=0, le=INT64)
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    prompt_logprobs: int | None = Field(None, ge=0, description="Not in a stream.")
    add_special_tokens: bool | None = None
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")
    request_id: str | None = Field(None, min_length=1, max_length=256)
    cache_salt: CacheSalt = None
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(
        None, max_length=1000
    )
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    truncate_prompt_tokens: TruncatePrompt = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: TextOrObject = None  # vLLM's older names
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | None = None  # SGLang's names
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> GenerationRequest:
        if self.best_of not in (None, self.n or 1):
            raise field_error("best_of", f"best_of must be n, which is {self.n or 1}: it is {self.best_of}")
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "stream_options may only be set with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("prompt_logprobs", "prompt_logprobs are not available with stream=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens with log-probabilities; None: no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self) -> SamplingParams:
        """Raises ValueError for a value out of range."""
        given = {
            name: getattr(self, name)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                "n", "min_tokens", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", *self.OF_PARAMS,
            )
            if getattr(self, name) is not None
        }  # fmt: skip
        bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        return self.PARAMS(
            **given,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logit_bias=bias or None,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            structured_outputs=structured_outputs(self),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            max_tokens=self.token_limit,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
        )

    @property
    def token_limit(self) -> int | None:
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(16, ge=0, le=INT64, description="0 is allowed only with echo.")
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = False

    @model_validator(mode="after")
    def _something_to_do(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "max_tokens must be at least 1, or 0 with echo=true, got 0")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        # 0: one token is generated and left out of the answer
        return 1 if self.max_tokens == 0 else self.max_tokens


class Function(Strict):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Conversation(Body):
    """The input of the chat template."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=512)
    documents: list[dict[str, str]] | None = Field(None, max_length=512)
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = Field(
        None, min_length=1, description="Only with the server's --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _messages_have_content(self) -> Conversation:
        check_content(self.messages or ())
        return self


def _tool_choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    if (
        isinstance(function, dict)
        and value.get("type") == "function"
        and isinstance(function.get("name"), str)
    ):
        return {"type": "function", "function": {"name": function["name"]}}
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


_NAMED_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_CHOICE]}


class ChatCompletionRequest(GenerationRequest, Conversation):
    max_tokens: int | None = Field(None, ge=1, le=INT64)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT64, description="Takes precedence over max_tokens."
    )
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0)
    tool_choice: Annotated[Any, PlainValidator(_tool_choice), WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: Annotated[Any, PlainValidator(_no_echo), WithJsonSchema(_NO_ECHO)] = False

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs needs logprobs=true")
        return self

    @model_validator(mode="after")
    def _tool_choice_has_tools(self) -> ChatCompletionRequest:
        if self.tool_choice in (None, "none", "auto"):
            return self
        names = [tool.function.name for tool in self.tools or ()]
        if not names:
            raise field_error("tool_choice", f"tool_choice {self.tool_choice!r} needs tools")
        if self.named_tool is not None and self.named_tool not in names:
            raise field_error(
                "tool_choice", f"tool_choice names the function {self.named_tool!r}; tools has {names}"
            )
        return self

    @property
    def named_tool(self) -> str | None:
        """The function that tool_choice names."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class UnmaskRequest(GenerationRequest):
    """The fields of UnmaskParams, for diffusion language models."""

    PARAMS: ClassVar[type[SamplingParams]] = UnmaskParams
    OF_PARAMS: ClassVar[tuple[str, ...]] = OWN

    block_length: int | None = Field(None, ge=1, le=INT64, description="Must divide max_tokens.")
    steps: int | None = Field(None, ge=1, le=INT64, description="Must be a multiple of the number of blocks.")
    threshold: float | None = Field(None, gt=0, le=1)
    remasking: Literal["low_confidence", "random"] | None = None
    cfg_scale: float | None = Field(None, ge=0, le=MAX_GUIDANCE)
    block_cache: Literal["none", "prefix", "dual"] | None = None


class UnmaskCompletionRequest(UnmaskRequest, CompletionRequest):
    pass


class UnmaskChatCompletionRequest(UnmaskRequest, ChatCompletionRequest):
    pass


def _either_in_schema(schema: dict[str, Any]) -> None:
    unserved.add_to_schema(schema)
    schema["oneOf"] = [
        {"required": [name], "properties": {name: {"type": kind}, other: {"type": "null"}}}
        for name, kind, other in (("prompt", "string", "messages"), ("messages", "array", "prompt"))
    ]


class TokenizeRequest(Conversation):
    """Tokenize a prompt or messages."""

    model_config = ConfigDict(json_schema_extra=_either_in_schema)

    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _either(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "give either prompt or messages")
        return self


UseActivation = Annotated[
    bool | None, Field(description="False: vectors without normalization, logits instead of probabilities.")
]


class PoolingRequest(Body):
    """Common fields of encoders. Images and videos are content parts."""

    input: Annotated[Any, PlainValidator(_input), WithJsonSchema(_INPUT_SCHEMA)]
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    @model_validator(mode="before")
    @classmethod
    def _of_messages(cls, data: Any) -> Any:
        """vLLM's form for images: one conversation with one image or video."""
        if not isinstance(data, dict) or data.get("messages") is None:
            return data
        if data.get("input") is not None:
            raise field_error("input", "give either input or messages")
        rest = {k: v for k, v in data.items() if k not in ("messages", "input")}
        return {**rest, "input": _visual_of(data["messages"])}

    @property
    def inputs(self) -> list[str | list[int] | dict[str, Any]]:
        """The inputs one by one: texts, token ids, images or videos."""
        given = self.input
        return [given] if isinstance(given, (str, dict)) or isinstance(given[0], int) else given


class TextPoolingRequest(PoolingRequest):
    """vLLM's additional fields of embeddings and classification."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatePrompt = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: UseActivation = None


class ClassificationRequest(TextPoolingRequest):
    """vLLM's /classify."""


class EmbeddingRequest(TextPoolingRequest):
    """OpenAI's embeddings, with vLLM's fields."""

    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(
        None, ge=1, le=2**31 - 1, description="For models with Matryoshka embeddings."
    )


class PoolingTaskRequest(EmbeddingRequest):
    """vLLM's /pooling: any task of the model. input_type: the form of texts, for late interaction."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    input_type: Literal["query", "document"] | None = None


def _texts(value: Any) -> list[str]:
    """One text or a list of texts. A text may be empty, as in vLLM: a corpus may have an empty document."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError("must be a text or a list of texts, not empty")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"at most {MAX_INPUTS} entries are allowed, got {len(texts)}")
    return texts


Texts = Annotated[
    Any,
    PlainValidator(_texts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _array({"type": "string"}, MAX_INPUTS, 1)]}),
]
MaxTokens = Annotated[
    int | None, Field(ge=0, le=INT64, description="Cut each of these texts to so many tokens; 0: not at all.")
]


class ScoringRequest(Body):
    """Common fields of scores and reranking."""

    max_tokens_per_query: MaxTokens = 0
    max_tokens_per_doc: MaxTokens = 0
    truncate_prompt_tokens: TruncatePrompt = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: UseActivation = None
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")


class SamplesRequest(Body):
    """The samples of a recommender, whose fields depend on the model."""

    inputs: dict[str, Any] | list[dict[str, Any]]
    use_activation: UseActivation = None
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples one by one."""
        return [self.inputs] if isinstance(self.inputs, dict) else self.inputs


class CloudsRequest(Body):
    """Point clouds, whose fields depend on the model."""

    inputs: dict[str, Any] | list[dict[str, Any]]
    output: Literal["labels", "probabilities", "logits", "features"] | None = Field(
        None, description="The numbers of each point next to its label; by default none."
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = Field(None, description="Accepted and ignored.")
    priority: int | None = Field(0, ge=-INT64 - 1, le=INT64, description="Lower goes first.")

    @property
    def clouds(self) -> list[dict[str, Any]]:
        """The clouds one by one."""
        return [self.inputs] if isinstance(self.inputs, dict) else self.inputs


# vLLM's names of the two sides of a score
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _sides_in_schema(schema: dict[str, Any]) -> None:
    unserved.add_to_schema(schema)
    schema["oneOf"] = [{"required": list(sides)} for sides in SIDES]


class ScoreRequest(ScoringRequest):
    """vLLM's /score, with each of its names for the two sides."""

    model_config = ConfigDict(json_schema_extra=_sides_in_schema)

    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    text_1: Texts = None
    text_2: Texts = None

    @model_validator(mode="after")
    def _two_sides(self) -> ScoreRequest:
        given = {name for sides in SIDES for name in sides} & self.model_fields_set
        if given not in [set(sides) for sides in SIDES]:
            choices = ", or ".join(" and ".join(sides) for sides in SIDES)
            raise field_error("queries", f"give {choices}; got {', '.join(sorted(given)) or 'none of them'}")
        return self

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Queries and documents."""
        first, second = next(sides for sides in SIDES if set(sides) <= self.model_fields_set)
        return getattr(self, first), getattr(self, second)


class RerankRequest(ScoringRequest):
    """Jina's and Cohere's rerank, as in vLLM. top_n: the number of results, 0 for all.

    return_documents: Jina's and Cohere's; False: results have no `document`
    """

    query: str = Field(min_length=1)
    documents: Texts
    top_n: int | None = Field(0, ge=0, le=INT64)
    return_documents: bool | None = True

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Queries and documents."""
        return [self.query], self.documents


class DetokenizeRequest(Body):
    tokens: list[TokenId]


FIELDS: frozenset[str] = frozenset(
    (
        UnmaskCompletionRequest.model_fields
        | UnmaskChatCompletionRequest.model_fields
        | TokenizeRequest.model_fields
    ).keys()
)
