"""The bodies of answers: whole, or as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from .protocol import GenerationRequest, usage
from .request import RequestOutput


class Answer:
    """A completion's answer. Chunks carry token ids if `return_token_ids` was asked for, as vLLM's do."""

    kind = chunk_kind = "text_completion"

    def __init__(self, answer_id: str, model: str, body: GenerationRequest):
        self.id, self.model, self.body = answer_id, model, body
        self.created = int(time.time())
        self.prompt_tokens: dict[int, int] = {}
        self.completion_tokens: dict[int, int] = {}
        options = body.stream_options
        self.usage_at_end = bool(options and options.include_usage)
        self.usage_always = bool(options and options.continuous_usage_stats and options.include_usage)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        for index, output in enumerate(outputs):
            self._count(index, output)
        choices = [self._whole_choice(i, o) for i, o in enumerate(outputs)]
        return {**self._head(self.kind), "choices": choices, "usage": self._usage()}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        return iter(())

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        first = index not in self.prompt_tokens
        self._count(index, output)
        choice = self._text(output.new_text, delta=True) | self._ends(index, output)
        if self.body.return_token_ids:
            choice["token_ids"] = output.new_token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        chunk = {**self._head(self.chunk_kind), "choices": [choice]}
        if self.usage_at_end:
            chunk["usage"] = self._usage() if self.usage_always else None
        yield chunk

    def closing(self) -> Iterator[dict[str, Any]]:
        if self.usage_at_end:
            yield {**self._head(self.chunk_kind), "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _text(self, text: str, delta: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def _ends(self, index: int, output: RequestOutput) -> dict[str, Any]:
        out = output.outputs[0]
        return {"index": index, "finish_reason": out.finish_reason, "stop_reason": out.stop_reason}

    def _whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        choice = self._text(output.outputs[0].text, delta=False) | self._ends(index, output)
        if self.body.return_token_ids:
            choice["token_ids"] = output.outputs[0].token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _count(self, index: int, output: RequestOutput) -> None:
        self.prompt_tokens[index] = len(output.prompt_token_ids)
        self.completion_tokens[index] = len(output.outputs[0].token_ids)

    def _usage(self) -> dict[str, int]:
        return usage(sum(self.prompt_tokens.values()), sum(self.completion_tokens.values()))


class ChatAnswer(Answer):
    """A chat completion's answer. In a stream the role comes with the first token's chunk."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    _role_sent = False

    def _text(self, text: str, delta: bool) -> dict[str, Any]:
        if not delta:
            return {"message": {"role": "assistant", "content": text}, "logprobs": None}
        role = {} if self._role_sent else {"role": "assistant"}
        self._role_sent = True
        return {"delta": {**role, "content": text}, "logprobs": None}
