"""The answer to a request to /v1/responses, complete or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import to_json

from fastkernels.engine.http.answers.logprobs import chat_logprobs
from fastkernels.engine.http.answers.responses import Answer, Outputs, Prompt
from fastkernels.engine.http.parsing.message import ContentTokens, MessageParser, last_tokens
from fastkernels.engine.http.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from fastkernels.engine.http.responses_api.protocol import ResponsesRequest
from fastkernels.engine.scheduling.request import CompletionOutput


class ResponseAnswer(Answer):
    """Items of output in the order of their arrival; one is open at a time."""

    def __init__(
        self, answer_id: str, model: str, chat: Any, prompt: Prompt, spell: Any, request: ResponsesRequest,
        make_parser: Callable[[], MessageParser] | None, count_tokens: Callable[[str], int],
    ):  # fmt: skip
        super().__init__(answer_id, model, chat, [prompt], spell)
        self.request, self.count_tokens = request, count_tokens
        make = make_parser or (lambda: MessageParser(None, None))
        self.parser = make()
        self._tokens: ContentTokens[dict[str, Any]] | None = (
            ContentTokens(make()) if request.logprobs else None
        )
        self._logprobs: list[dict[str, Any]] = []  # of content that no event has yet
        self.output: list[dict[str, Any]] = []  # complete items, and the open one as it is so far
        self.status = "in_progress"
        self.finished_at: int | None = None
        self._number = 0  # of the next event
        self._open = False  # whether the last item is

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        ((_, output),) = outputs
        self._note(0, output)
        (out,) = output.outputs
        message = self.parser.whole(out.text)
        if self._tokens is not None and message.calls:
            self._logprobs = [*self._tokens.feed(self._spelled(out)), *self._tokens.finish()]
        elif self._tokens is not None:  # the content is the end of the text
            self._logprobs = last_tokens(self._spelled(out), len(message.content or ""))
        pieces: list[Piece] = []
        if message.reasoning is not None:
            pieces.append(Reasoning(message.reasoning))
        if message.content or not (message.calls or pieces):
            pieces.append(Content(message.content or ""))
        for i, call in enumerate(message.calls):
            pieces += [CallStart(i, call.id, call.name), CallArguments(i, call.arguments)]
        self._add(pieces)
        self._end(out.finish_reason)
        return self.body_of_response()

    def opening(self) -> bytes:
        response = {"response": self.body_of_response()}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def events(self, outputs: Outputs) -> bytes:
        events = b""
        for _, output in outputs:
            self._note(0, output)
            for out in output.outputs:
                pieces = self.parser.feed(out.text)
                if self._tokens is not None:
                    self._logprobs += self._tokens.feed(self._spelled(out))
                if out.finish_reason is not None:
                    pieces += self.parser.finish()
                    self._logprobs += [] if self._tokens is None else self._tokens.finish()
                    if not self.output and not pieces:
                        pieces = [Content("")]
                events += self._add(pieces)
                if out.finish_reason is not None:
                    events += self._end(out.finish_reason)
        return events

    def closing(self) -> bytes:
        return b""

    def failed(self, message: str, status: int) -> bytes:
        self.status = "failed"
        error = {"code": "server_error", "message": message}
        return self._event("response.failed", {"response": {**self.body_of_response(), "error": error}})

    def body_of_response(self) -> dict[str, Any]:
        """The response as it is so far."""
        request, details = self.request, None
        if self.status == "incomplete":
            details = {"reason": "max_output_tokens"}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "completed_at": self.finished_at,
            "status": self.status, "background": False, "error": None, "incomplete_details": details,
            "instructions": request.instructions, "max_output_tokens": request.max_output_tokens,
            "model": self.model, "output": list(self.output),
            "parallel_tool_calls": request.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": None if request.reasoning is None else request.reasoning.model_dump(),
            "service_tier": "default", "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}} if request.text is None
            else request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": request.tool_choice or "auto",
            "tools": [t.model_dump() for t in request.tools or ()],
            "top_p": 1.0 if request.top_p is None else request.top_p, "truncation": "disabled",
            "usage": None if self.status == "in_progress" else self.usage(), "user": request.user,
            "metadata": request.metadata or {},
        }  # fmt: skip

    def usage(self) -> dict[str, Any]:
        found = super().usage()
        reasoning = sum(
            self.count_tokens(part["text"])
            for item in self.output
            if item["type"] == "reasoning"
            for part in item["content"]
        )
        return {
            "input_tokens": found["prompt_tokens"], "input_tokens_details": found["prompt_tokens_details"],
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(reasoning, found["completion_tokens"])},
            "total_tokens": found["total_tokens"],
        }  # fmt: skip

    def _spelled(self, out: CompletionOutput) -> list[tuple[str, dict[str, Any]]]:
        """(text, log-probability) of each token."""
        top = self.request.top_logprobs or 0
        found = chat_logprobs(out.token_ids, out.logprobs or (), top, self.spell)["content"]
        return [(entry["token"], entry) for entry in found]

    def _add(self, pieces: Iterable[Piece]) -> bytes:
        """The events of these pieces."""
        events = b""
        for piece in pieces:
            if isinstance(piece, CallStart):
                item = {
                    "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                    "call_id": piece.id, "name": piece.name, "arguments": "",
                }  # fmt: skip
                events += self._close() + self._open_item(item)
            elif isinstance(piece, CallArguments):
                self.output[-1]["arguments"] += piece.text
                events += self._item_event("response.function_call_arguments.delta", delta=piece.text)
            else:
                events += self._add_text(piece)
        return events

    def _add_text(self, piece: Content | Reasoning) -> bytes:
        thinks, events = isinstance(piece, Reasoning), b""
        kind = "reasoning" if thinks else "message"
        if not self._open or self.output[-1]["type"] != kind:
            item: dict[str, Any] = {
                "id": f"{'rs' if thinks else 'msg'}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress",
                **({"summary": []} if thinks else {"role": "assistant"}), "content": [],
            }  # fmt: skip
            events += self._close() + self._open_item(item)
            part = {"type": "reasoning_text", "text": ""} if thinks else {
                "type": "output_text", "text": "", "annotations": [], "logprobs": [],
            }  # fmt: skip
            item["content"].append(part)
            events += self._item_event("response.content_part.added", content_index=0, part=part)
        self.output[-1]["content"][0]["text"] += piece.text
        name = "response.reasoning_text.delta" if thinks else "response.output_text.delta"
        more: dict[str, Any] = {} if thinks else {"logprobs": self._taken_logprobs()}
        return events + self._item_event(name, content_index=0, delta=piece.text, **more)

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        """Move the log-probabilities that no event has to the open message."""
        new, self._logprobs = self._logprobs, []
        self.output[-1]["content"][0]["logprobs"] += new
        return new

    def _open_item(self, item: dict[str, Any]) -> bytes:
        self.output.append(item)
        self._open = True
        return self._event("response.output_item.added", {"output_index": len(self.output) - 1, "item": item})

    def _close(self, status: str = "completed") -> bytes:
        """End the open item."""
        if not self._open:
            return b""
        self._open, item = False, self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            events = self._item_event("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            (part,) = item["content"]
            thinks = item["type"] == "reasoning"
            done = "response.reasoning_text.done" if thinks else "response.output_text.done"
            if not thinks:
                self._taken_logprobs()
            more: dict[str, Any] = {} if thinks else {"logprobs": part["logprobs"]}
            events = self._item_event(done, content_index=0, text=part["text"], **more)
            events += self._item_event("response.content_part.done", content_index=0, part=part)
        return events + self._event(
            "response.output_item.done", {"output_index": len(self.output) - 1, "item": item}
        )

    def _end(self, finish_reason: str | None) -> bytes:
        self.status = "incomplete" if finish_reason == "length" else "completed"
        self.finished_at = int(time.time())
        events = self._close(self.status)
        return events + self._event(f"response.{self.status}", {"response": self.body_of_response()})

    def _item_event(self, event: str, /, **fields: Any) -> bytes:
        """An event about the last item."""
        return self._event(
            event, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}
        )

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        if not self.body.stream:
            return b""
        body = to_json({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
