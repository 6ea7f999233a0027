"""What the server takes and gives: OpenAI's completions and chat completions, with vLLM's extensions that we serve."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .sampling_params import SamplingParams

# Parameters of OpenAI's or vLLM's that are not served, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "use_beam_search": (None, False),
}


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """What both kinds of request share. Fields that nobody defined are passed over, as OpenAI's server does."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _served(self) -> GenerationRequest:
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                allowed = " or ".join(repr(v) for v in NEUTRAL[name] if v is not None) or "leave it out"
                raise ValueError(f"{name}={value!r} is not supported; supported: {allowed}")
        return self

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises ValueError for a value out of range."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ChatCompletionRequest(GenerationRequest):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages with text parts joined into one string. Raises ValueError for parts that are not text."""
        found = []
        for i, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{i}] has no role")
            content = message.get("content")
            if isinstance(content, list):
                kinds = {p.get("type") for p in content if isinstance(p, dict)} - {"text"}
                if kinds or not all(isinstance(p, dict) for p in content):
                    raise ValueError(f"messages[{i}] has content that is not text: {sorted(map(str, kinds))}")
                content = "".join(p.get("text", "") for p in content)
            found.append({**message, "content": content or ""})
        return found


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def error_body(
    message: str, status: int, kind: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's error shape."""
    kinds = {
        400: "invalid_request_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return {
        "error": {
            "message": message,
            "type": kind or kinds.get(status, "server_error"),
            "param": param,
            "code": status,
        }
    }
