"""Routes of models that generate: completions, chat completions and the prefix cache."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import to_json

from fastkernels.engine.http import errors, schema
from fastkernels.engine.http import logprobs as answer_logprobs
from fastkernels.engine.http.context import Context
from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from fastkernels.engine.http.responses import Answer, ChatAnswer, CompletionAnswer, Prompt
from fastkernels.engine.http.streaming import EventStream, unless_gone
from fastkernels.engine.scheduling.outputs import RequestGroup
from fastkernels.engine.tokenizer import cut


class Generation:
    """PATHS: (path, method, schema) of the routes."""

    PATHS = (
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
        more = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        tools = body.tools if body.tool_choice != "none" else None
        ids = await self.context.prompts.chat(
            body.model_copy(update={"tools": tools}),
            body.add_special_tokens,
            self.context.prompt_limit(body.truncate_prompt_tokens),
            body.truncation_side,
            **more,
        )
        answer = ChatAnswer(
            self._id("chatcmpl", body, raw), self.context.model_name, body, [Prompt(ids)], self._spell(body)
        )
        return await self._answer(answer, body, raw)

    async def _answer(self, answer: Answer, body: GenerationRequest, raw: Request) -> Response:
        requests = await self._requests(answer.prompts, body)
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

    async def _requests(self, prompts: Sequence[Prompt], body: GenerationRequest) -> list[RequestGroup]:
        sequences, most = len(prompts) * (body.n or 1), self.context.llm.config.max_waiting
        if sequences > most:
            raise ApiError(
                400,
                f"{sequences} sequences (prompts times n) are more than the queue holds: {most}",
                "prompt",
            )
        own = uuid.uuid4().hex  # not the client's id: it may use one twice
        try:
            params = body.sampling_params()
            await self.context.llm.prepare(params)
            return [
                self.context.llm.make_request(f"{own}-{i}", p.token_ids, params, body.priority or 0)
                for i, p in enumerate(prompts)
            ]
        except ValueError as error:
            raise errors.refused(error, body) from error

    async def _encode(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        limit, side = self.context.prompt_limit(body.truncate_prompt_tokens), body.truncation_side
        if isinstance(prompt, list):
            return prompt if limit is None else cut(prompt, limit, side)
        special = body.add_special_tokens is not False
        return await self.context.prompts.text(prompt, special, limit=limit, side=side)

    def _spell(self, body: GenerationRequest) -> answer_logprobs.Spell:
        return answer_logprobs.speller(
            self.context.llm.engine.tokenizer, bool(body.return_tokens_as_token_ids)
        )

    @staticmethod
    def _id(prefix: str, body: GenerationRequest, raw: Request) -> str:
        """The client's id from the body or the x-request-id header, or a new one."""
        given = body.request_id or raw.headers.get("x-request-id", "")[:256]
        return f"{prefix}-{given or uuid.uuid4().hex}"
