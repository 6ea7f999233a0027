"""The state that the handlers of all routes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastkernels.engine.async_llm import AsyncLLM
from fastkernels.engine.http.answers.metrics import Metrics
from fastkernels.engine.http.answers.responses import Prompt
from fastkernels.engine.http.parsing.reasoning import ReasoningParser
from fastkernels.engine.http.parsing.tool_parsers import ToolFormat
from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.media import MediaPrompts
from fastkernels.engine.http.requests.messages import media_urls
from fastkernels.engine.http.requests.prompts import Prompts
from fastkernels.engine.http.requests.protocol import Conversation
from fastkernels.engine.scheduling.scheduler import QueueFull
from fastkernels.engine.stream import OutputStream


@dataclass(frozen=True)
class Context:
    """One server's engine and its surroundings. model_name: what clients call the model; reasoning: None for none."""

    config: ServerConfig
    llm: AsyncLLM
    model_name: str
    metrics: Metrics
    prompts: Prompts
    tools: ToolFormat
    reasoning: type[ReasoningParser] | None
    media: MediaPrompts

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for another model than this server's."""
        if name not in (None, "", self.model_name, self.llm.config.model):
            raise ApiError(
                404, f"the model {name!r} does not exist; this server has {self.model_name!r}", "model"
            )

    def prompt_limit(self, wanted: int | None, room: int = 1) -> int | None:
        """See Engine.prompt_limit. Raises ApiError."""
        try:
            return self.llm.engine.prompt_limit(wanted, room)
        except ValueError as error:
            raise ApiError(400, str(error), "truncate_prompt_tokens") from error

    async def chat(
        self,
        body: Conversation,
        special: bool | None = None,
        limit: int | None = None,
        side: str | None = None,
        **more: Any,
    ) -> Prompt:
        """The prompt of a conversation, with its media. Raises ApiError. See Prompts.chat."""
        given = media_urls([m.content for m in body.messages])
        self.media.check(given, limit)
        ids = await self.prompts.chat(body, special, limit, side, **more)
        if not given:
            return Prompt(ids)
        media = await self.media.read(ids, given)
        return Prompt(media.token_ids, media=media)

    async def open(self, requests: Sequence[Any]) -> OutputStream:
        """Queue requests, all or none. Raises QueueFull, which counts as a refused request."""
        try:
            return await self.llm.open(requests)
        except QueueFull:
            self.metrics.refused += 1
            raise
