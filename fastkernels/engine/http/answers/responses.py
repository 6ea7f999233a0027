"""Bodies of answers, complete or as events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from fastkernels import __version__
from fastkernels.engine.http.answers.logprobs import (
    Spell,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_body,
)
from fastkernels.engine.http.parsing.message import MessageParser, chat_delta, chat_message
from fastkernels.engine.http.requests.errors import error_body
from fastkernels.engine.http.requests.protocol import ChatCompletionRequest, CompletionRequest
from fastkernels.engine.inputs.media import MediaPrompt
from fastkernels.engine.scheduling.request import CompletionOutput, PromptLogprobs, RequestOutput

FINGERPRINT = f"fastkernels-{__version__}"  # what a seed's repeatable answer depends on, with the model
Outputs = Sequence[tuple[int, RequestOutput]]  # (index of the prompt, its output)


@dataclass
class Prompt:
    """One prompt of a request. text is set only if it is echoed. media: the same prompt, if it has images."""

    token_ids: list[int]
    text: str = ""
    media: MediaPrompt | None = None
    logprobs: PromptLogprobs | None = None
    num_cached: int = 0


class Answer:
    """The answer to one HTTP request: common part of completions and chat completions."""

    kind = chunk_kind = ""

    def __init__(
        self, answer_id: str, model: str, body: CompletionRequest | ChatCompletionRequest, prompts: list[Prompt],
        spell: Spell,
    ):  # fmt: skip
        self.id, self.body, self.prompts, self.spell = answer_id, body, prompts, spell
        self.n, self.ids = body.n or 1, bool(body.return_token_ids)
        self.created = int(time.time())
        self.model = model
        self.num_tokens: dict[int, int] = {}  # generated, by choice
        self.begun: set[int] = set()  # choices with a first event
        options = body.stream_options
        self.usage_at_end = bool(options and options.include_usage)
        self.usage_always = self.usage_at_end and bool(options and options.continuous_usage_stats)
        self._before = b'data: %b,"choices":[' % to_json(self._head(self.chunk_kind))[:-1]
        self._after = b',"usage":null}\n\n' if self.usage_at_end else b"}\n\n"

    def whole(self, outputs: Outputs) -> dict[str, Any]:
        """The complete body, from the final output of every prompt."""
        choices = []
        for prompt, output in sorted(outputs, key=lambda item: item[0]):
            self._note(prompt, output)
            for out in sorted(output.outputs, key=lambda o: o.index):
                choices.append(self._choice(prompt, out, True))
        return {**self._head(self.kind), "choices": choices, "usage": self.usage(), **self._top_level()}

    def opening(self) -> bytes:
        """The events before the first output."""
        return b""

    def failed(self, message: str, status: int) -> bytes:
        """The last events of a stream that ends with an error."""
        return event(error_body(message, status)) + b"data: [DONE]\n\n"

    def events(self, outputs: Outputs) -> bytes:
        """Server-sent events, one for each choice with news."""
        events: list[bytes] = []
        for prompt, output in outputs:
            self._note(prompt, output)
            for out in output.outputs:
                index = prompt * self.n + out.index
                first = index not in self.begun
                choice = self._choice(prompt, out, first)
                if choice is None:
                    continue
                self.begun.add(index)
                more = self._first_fields() if first else b""
                after = b',"usage":%b}\n\n' % to_json(self.usage()) if self.usage_always else self._after
                events += (self._before, to_json(choice), b"]", more, after)
        return b"".join(events)

    def closing(self) -> bytes:
        """The last events."""
        done = b"data: [DONE]\n\n"
        if not self.usage_at_end:
            return done
        return event({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()}) + done

    def usage(self) -> dict[str, Any]:
        prompt, completion = sum(len(p.token_ids) for p in self.prompts), sum(self.num_tokens.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(p.num_cached for p in self.prompts)},
        }  # fmt: skip

    def _note(self, prompt: int, output: RequestOutput) -> None:
        self.prompts[prompt].num_cached = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompts[prompt].logprobs = output.prompt_logprobs
        for out in output.outputs:
            self.num_tokens[prompt * self.n + out.index] = out.num_tokens

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    def _top_level(self) -> dict[str, Any]:
        return {}

    def _first_fields(self) -> bytes:
        """Additional fields of the first event of a choice."""
        return b""

    def _choice(self, prompt: int, out: CompletionOutput, first: bool) -> dict[str, Any] | None:
        """None: nothing new, in a stream."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    body: CompletionRequest

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._offsets: dict[int, int] = {}

    def _choice(self, prompt: int, out: CompletionOutput, first: bool) -> dict[str, Any]:
        body, of = self.body, self.prompts[prompt]
        index = prompt * self.n + out.index
        text, new = out.text, list(out.token_ids)
        if body.max_tokens == 0:  # echo only: one token was generated to compute the prompt
            text, new, self.num_tokens[index] = "", [], 0
        choice: dict[str, Any] = {
            "index": index, "text": of.text + text if first else text, "logprobs": None,
            "finish_reason": out.finish_reason, "stop_reason": out.stop_reason,
        }  # fmt: skip
        if body.logprobs is not None:
            ids, entries = new, list(out.logprobs or ())[: len(new)]
            if body.echo and first:
                ids, entries = [*of.token_ids, *new], [*(of.logprobs or ()), *entries]
            choice["logprobs"], self._offsets[index] = completion_logprobs(
                ids, entries, self._offsets.get(index, 0), self.spell
            )
        if self.ids:
            choice["token_ids"], choice["prompt_token_ids"] = new, of.token_ids if first else None
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(of.logprobs, self.spell)
        return choice


class ChatAnswer(Answer):
    """In a stream, the first event of a choice carries the role.

    make_parser: makes the parser of a choice's text; None: the text is the content
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    body: ChatCompletionRequest

    def __init__(self, *args: Any, make_parser: Callable[[], MessageParser] | None = None):
        super().__init__(*args)
        self._parsers = None if make_parser is None else [make_parser() for _ in range(self.n)]

    def _first_fields(self) -> bytes:
        return b',"prompt_token_ids":%b' % to_json(self.prompts[0].token_ids) if self.ids else b""

    def _choice(self, prompt: int, out: CompletionOutput, first: bool) -> dict[str, Any] | None:
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        reason = out.finish_reason
        if self._parsers is None:
            message["content"] = out.text
        else:
            found = self._parsed(self._parsers[out.index], out)
            if not (found or first or reason or self.ids or self.body.logprobs or self.usage_always):
                return None
            message.update({"content": "", **found} if first and self.body.stream else found)
            # A named choice always calls its function, so it ends with "stop", as at OpenAI.
            if reason == "stop" and self.body.named_tool is None and self._parsers[out.index].called:
                reason = "tool_calls"
        choice: dict[str, Any] = {
            "index": out.index, "delta" if self.body.stream else "message": message, "logprobs": None,
            "finish_reason": reason, "stop_reason": out.stop_reason,
        }  # fmt: skip
        if self.body.logprobs:
            top = self.body.top_logprobs or 0
            choice["logprobs"] = chat_logprobs(out.token_ids, out.logprobs or (), top, self.spell)
        if self.ids:
            choice["token_ids"] = list(out.token_ids)
        return choice

    def _parsed(self, parser: MessageParser, out: CompletionOutput) -> dict[str, Any]:
        """The fields of a message, or in a stream of a delta."""
        if not self.body.stream:
            return chat_message(parser.whole(out.text))
        pieces = parser.feed(out.text)
        return chat_delta([*pieces, *parser.finish()] if out.finish_reason is not None else pieces)

    def _top_level(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.ids:
            found["prompt_token_ids"] = self.prompts[0].token_ids
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_body(self.prompts[0].logprobs, self.spell)
        return found


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(body)
