"""The answer to a request to /v1/messages, complete or as events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import from_json, to_json

from fastkernels.engine.http.answers.responses import Answer, Outputs, Prompt
from fastkernels.engine.http.parsing.message import MessageParser
from fastkernels.engine.http.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from fastkernels.engine.http.requests.errors import ANTHROPIC, error_body
from fastkernels.engine.scheduling.request import CompletionOutput


class MessagesAnswer(Answer):
    """Blocks of content in the order of their arrival; one is open at a time."""

    def __init__(
        self, answer_id: str, model: str, chat: Any, prompt: Prompt, spell: Any,
        make_parser: Callable[[], MessageParser] | None,
    ):  # fmt: skip
        super().__init__(answer_id, model, chat, [prompt], spell)
        self.parser = MessageParser(None, None) if make_parser is None else make_parser()
        self._begun = False
        self._kind: type[Piece] | None = None  # of the open block
        self._num_blocks = 0

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        ((_, output),) = outputs
        self._note(0, output)
        (out,) = output.outputs
        message = self.parser.whole(out.text)
        content: list[dict[str, Any]] = []
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": uuid.uuid4().hex})
        if message.content or not (message.calls or content):
            content.append({"type": "text", "text": message.content or ""})
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
            for call in message.calls
        ]
        return {**self._message(), "content": content, **self._stop(out), "usage": self.usage()}

    def events(self, outputs: Outputs) -> bytes:
        events = b""
        for _, output in outputs:
            self._note(0, output)
            for out in output.outputs:
                if not self._begun:
                    self._begun = True
                    head = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
                    usage = {**self.usage(), "output_tokens": 0}
                    events += _event("message_start", message={**head, "usage": usage})
                pieces = self.parser.feed(out.text)
                if out.finish_reason is not None:
                    pieces += self.parser.finish()
                    if not pieces and not self._num_blocks:
                        pieces = [Content("")]
                events += self._add(pieces)
                if out.finish_reason is not None:
                    events += self._close() + _event(
                        "message_delta", delta=self._stop(out), usage=self.usage()
                    )
        return events

    def closing(self) -> bytes:
        return _event("message_stop")

    def failed(self, message: str, status: int) -> bytes:
        error = error_body(message, status, path=ANTHROPIC)
        return b"event: error\ndata: %b\n\n" % to_json(error)

    def usage(self) -> dict[str, Any]:
        found = super().usage()
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": found["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": found["completion_tokens"],
        }  # fmt: skip

    def _message(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _stop(self, out: CompletionOutput) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if out.finish_reason == "length":
            reason = "max_tokens"
        elif self.parser.called:
            reason = "tool_use"
        elif isinstance(out.stop_reason, str):
            reason, sequence = "stop_sequence", out.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _add(self, pieces: Iterable[Piece]) -> bytes:
        """The events of these pieces."""
        events = b""
        for piece in pieces:
            if isinstance(piece, CallStart):
                events += self._open(
                    CallArguments, {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                )
                continue
            if self._kind is not type(piece):
                block = {"type": "text", "text": ""}
                if isinstance(piece, Reasoning):
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                events += self._open(type(piece), block)
            if isinstance(piece, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            elif isinstance(piece, Reasoning):
                delta = {"type": "thinking_delta", "thinking": piece.text}
            else:
                delta = {"type": "text_delta", "text": piece.text}
            events += self._delta(delta)
        return events

    def _open(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        events = self._close()
        self._kind, self._num_blocks = kind, self._num_blocks + 1
        return events + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        """End the open block."""
        if self._kind is None:
            return b""
        signed = b""
        if self._kind is Reasoning:
            signed = self._delta({"type": "signature_delta", "signature": uuid.uuid4().hex})
        self._kind = None
        return signed + _event("content_block_stop", index=self._num_blocks - 1)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **fields}))


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; {} if max_tokens has cut them off."""
    try:
        found = from_json(arguments)  # at most the levels that a body may have
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
