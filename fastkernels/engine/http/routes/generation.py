"""Routes of models that generate: completions, chat completions and the prefix cache."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http.answers import logprobs as answer_logprobs
from fastkernels.engine.http.answers import schema
from fastkernels.engine.http.answers.responses import Answer, ChatAnswer, CompletionAnswer, Prompt
from fastkernels.engine.http.answers.streaming import EventStream, unless_gone
from fastkernels.engine.http.parsing.choice import plan_tools
from fastkernels.engine.http.parsing.message import MessageParser
from fastkernels.engine.http.requests import errors
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    UnmaskChatCompletionRequest,
    UnmaskCompletionRequest,
)
from fastkernels.engine.http.routes.context import Context
from fastkernels.engine.inputs.tokenizer import cut
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.scheduling.outputs import RequestGroup
from fastkernels.engine.structured.bodies import structured_outputs
from fastkernels.engine.structured.params import StructuredOutputsParams


@dataclass(frozen=True)
class Plan:
    """How a chat's answers are generated and parsed.

    make_parser  makes the parser of one answer; None: an answer is its text
    schema       JSON schema of the answers; None: any text
    """

    body: ChatCompletionRequest
    prompt: Prompt
    make_parser: Callable[[], MessageParser] | None
    schema: dict[str, Any] | None


class Generation:
    """PATHS: (path, method, schema) of the routes. Also the base of other APIs' routes for the same models."""

    PATHS: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/v1/completions", "completions", schema.COMPLETION),
        ("/v1/chat/completions", "chat", schema.CHAT),
        ("/reset_prefix_cache", "reset_prefix_cache", schema.DONE),  # vLLM's name
        ("/flush_cache", "reset_prefix_cache", schema.DONE),  # SGLang's name
    )

    def __init__(self, context: Context):
        self.context = context

    async def reset_prefix_cache(self) -> dict[str, bool]:
        """Forget cached prefixes. Running requests go on."""
        llm = self.context.llm
        await asyncio.wrap_future(llm.call(llm.engine.reset_prefix_cache))
        return {"success": True}

    async def completions(self, body: CompletionRequest, raw: Request) -> Response:
        self.context.check_model(body.model)
        prompts = []
        for given in body.prompts:
            ids = await self._encode(body, given)
            text = ""
            if body.echo:
                if isinstance(given, str) and body.truncate_prompt_tokens is None:
                    text = given
                else:
                    text = self.context.prompts.decode(ids)
            prompts.append(Prompt(ids, text))
        answer = CompletionAnswer(
            self._id("cmpl", body, raw), self.context.model_name, body, prompts, self._spell(body)
        )
        return await self._answer(answer, body, raw)

    async def chat(self, body: ChatCompletionRequest, raw: Request) -> Response:
        self.context.check_model(body.model)
        plan = await self._plan(body)
        answer = ChatAnswer(
            self._id("chatcmpl", body, raw), self.context.model_name, plan.body, [plan.prompt],
            self._spell(body), make_parser=plan.make_parser,
        )  # fmt: skip
        return await self._answer(answer, plan.body, raw, plan.schema)

    async def _plan(self, body: ChatCompletionRequest) -> Plan:
        """The prompt of a chat, and how its answers are parsed."""
        self.context.prompts.check_template(body)
        tools = plan_tools(body, self.context.tools)
        change: dict[str, Any] = {} if tools.parser is not None else {"tools": None}
        if tools.keeps_special_tokens:
            change["skip_special_tokens"] = False
        body = body.model_copy(update=change)
        more = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        prompt = await self.context.chat(
            body, body.add_special_tokens, self._prompt_limit(body), body.truncation_side, **more
        )
        # A structured output begins at once, without reasoning.
        structured = tools.schema is not None or _is_structured(body)
        reasoning = None if structured else self.context.reasoning
        if tools.parser is None and reasoning is None:
            return Plan(body, prompt, None, None)
        tail = "" if reasoning is None else self.context.prompts.tail(prompt.token_ids)

        def make_parser() -> MessageParser:
            return MessageParser(
                None if reasoning is None else reasoning(tail), None if tools.parser is None else tools.parser(),
                body.parallel_tool_calls is False, body.include_reasoning is not False,
            )  # fmt: skip

        return Plan(body, prompt, make_parser, tools.schema)

    async def _answer(
        self,
        answer: Answer,
        body: GenerationRequest,
        raw: Request,
        json_schema: dict[str, Any] | None = None,
        bodies: Sequence[GenerationRequest] = (),
    ) -> Response:
        """Generate. json_schema: the answers must be instances of it; bodies: of each prompt, if they differ."""
        each = bodies or [body] * len(answer.prompts)
        requests = await self._requests(answer.prompts, each, json_schema)
        # Queued before the status is sent: a full queue is a 429, not a broken stream.
        outputs = await self.context.open(requests)
        if body.stream:
            return EventStream(answer, outputs, self.context.config.stall_timeout)
        try:
            found = await unless_gone(raw, outputs.rest())
        finally:
            outputs.close()
        return (
            Response(status_code=499)
            if found is None
            else Response(to_json(answer.whole(found)), media_type="application/json")
        )

    async def _requests(
        self,
        prompts: Sequence[Prompt],
        bodies: Sequence[GenerationRequest],
        json_schema: dict[str, Any] | None,
    ) -> list[RequestGroup]:
        sequences, most = sum(body.n or 1 for body in bodies), self.context.llm.config.max_waiting
        if sequences > most:
            raise ApiError(
                400,
                f"{sequences} sequences (prompts times n) are more than the queue holds: {most}",
                "prompt",
            )
        for i, (prompt, body) in enumerate(zip(prompts, bodies, strict=True)):
            self._check_room(len(prompt.token_ids), body, f"prompt {i}" if len(prompts) > 1 else "the prompt")
        own = uuid.uuid4().hex  # not the client's id: it may use one twice
        made: list[RequestGroup] = []
        params: dict[int, SamplingParams] = {}  # by body, which many prompts may share
        for i, (prompt, body) in enumerate(zip(prompts, bodies, strict=True)):
            if id(body) not in params:
                params[id(body)] = await self._params(body, json_schema)
            try:
                made.append(
                    self.context.llm.make_request(
                        f"{own}-{i}", prompt.media or prompt.token_ids, params[id(body)], body.priority or 0,
                        cache_salt=body.cache_salt,
                    )
                )  # fmt: skip
            except ValueError as error:
                raise errors.refused(error, body) from error
        return made

    async def _params(self, body: GenerationRequest, json_schema: dict[str, Any] | None) -> SamplingParams:
        """The sampling parameters of a body, ready for make_request. Raises ApiError."""
        try:
            params = body.sampling_params()
            if json_schema is not None:
                if params.structured_outputs is not None:
                    raise ApiError(
                        400,
                        "tool_choice and a structured output cannot both decide the answer",
                        "tool_choice",
                    )
                wanted = StructuredOutputsParams(json=json_schema, disable_any_whitespace=True)
                params = replace(params, structured_outputs=wanted)
            await self.context.llm.prepare(params)
        except ValueError as error:
            raise errors.refused(error, body) from error
        return params

    def _check_room(self, tokens: int, body: GenerationRequest, prompt: str) -> None:
        """Raise ApiError for more tokens than the context has room for, rather than generate fewer."""
        most = self.context.llm.engine.max_model_len
        room = most - tokens
        if room < 1:
            return  # the engine refuses the prompt itself
        for field in ("min_tokens", "max_tokens", "max_completion_tokens"):
            wanted = getattr(body, field, None) if field in body.model_fields_set else None
            if wanted is not None and wanted > room:
                raise ApiError(
                    400,
                    f"{field} is {wanted}, and the context has room for {room} tokens: its maximum length is {most}"
                    f" tokens and {prompt} has {tokens}",
                    field,
                )

    async def _encode(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        limit, side = self._prompt_limit(body), body.truncation_side
        if isinstance(prompt, list):
            return prompt if limit is None else cut(prompt, limit, side)
        special = body.add_special_tokens is not False
        return await self.context.prompts.text(prompt, special, limit=limit, side=side)

    def _prompt_limit(self, body: GenerationRequest) -> int | None:
        """The most tokens of a prompt. With truncate_prompt_tokens -1, max_tokens and min_tokens fit after it."""
        room = max(1, body.token_limit or 0, body.min_tokens or 0)
        return self.context.prompt_limit(body.truncate_prompt_tokens, room)

    def _spell(self, body: GenerationRequest) -> answer_logprobs.Spell:
        return answer_logprobs.speller(
            self.context.llm.engine.tokenizer, bool(body.return_tokens_as_token_ids)
        )

    @staticmethod
    def _id(prefix: str, body: GenerationRequest, raw: Request) -> str:
        """The client's id from the body or the x-request-id header, or a new one."""
        given = body.request_id or raw.headers.get("x-request-id", "")[:256]
        return f"{prefix}-{given or uuid.uuid4().hex}"


class Unmasking(Generation):
    """Routes of diffusion language models: completions and chat completions with fields of their own."""

    PATHS = Generation.PATHS[:2]

    async def completions(self, body: UnmaskCompletionRequest, raw: Request) -> Response:  # type: ignore[override]
        return await super().completions(body, raw)

    async def chat(self, body: UnmaskChatCompletionRequest, raw: Request) -> Response:  # type: ignore[override]
        return await super().chat(body, raw)


def _is_structured(body: GenerationRequest) -> bool:
    try:
        return structured_outputs(body) is not None
    except ValueError:  # refused with the other parameters
        return False
