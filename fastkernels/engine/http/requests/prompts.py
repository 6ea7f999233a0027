"""Tokenizes prompts: text, and conversations with the model's chat template."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2
from pydantic_core import from_json

from fastkernels.engine.http.requests import templates
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.messages import ROLES, Message
from fastkernels.engine.http.requests.protocol import Conversation
from fastkernels.engine.http.requests.unserved import shown
from fastkernels.engine.inputs.tokenizer import encode, encode_pair, shortened

log = logging.getLogger("fastkernels")
SMALL = 4096  # characters tokenized in the event loop (about 1 ms); longer texts go to a thread
T = TypeVar("T")


class Prompts:
    """Tokenizes for one model. Long texts share one thread, because a tokenizer is not safe in several."""

    def __init__(
        self, tokenizer: Any, max_model_len: int, trust_request_template: bool = False,
        placeholders: Mapping[str, str] | None = None,
    ):  # fmt: skip
        """placeholders: {kind of media: text that stands for one}"""
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.placeholders = placeholders or {}
        self.trust_request_template = trust_request_template
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastkernels-tokenizer")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def max_characters(self) -> int:
        """A longer text has more than max_model_len tokens, whatever its tokens are."""
        longest = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        return longest * self.max_model_len

    @functools.cached_property
    def _reserved(self) -> frozenset[str]:
        """Names that chat_template_kwargs must not set: the parameters of the functions that take them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        functions = (self.tokenizer.apply_chat_template, render_jinja_template)
        names = {name for function in functions for name in inspect.signature(function).parameters}
        return frozenset(names | {"messages", "self"})  # parameters of Jinja's own function

    async def text(
        self,
        text: str,
        special: bool = True,
        field: str = "prompt",
        limit: int | None = None,
        side: str | None = None,
    ) -> list[int]:
        """Token ids of a text. Raises ApiError without a tokenizer, or for a text too long for the model.

        limit, side: of tokenizer.encode.
        """
        self._check_length(text, field, limit)
        return await self._run(
            len(text), functools.partial(encode, self.tokenizer, text, special, limit, side)
        )

    async def pair(
        self, first: str, second: str, limit: int | None = None, side: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids and types of two texts for a cross-encoder; see tokenizer.encode_pair. Raises ApiError."""
        self._check_length(first + second, "documents", limit)
        work = functools.partial(encode_pair, self.tokenizer, first, second, limit, side)
        return await self._run(len(first) + len(second), work)

    async def shortened(self, text: str, limit: int) -> str:
        """The beginning of a text that has at most `limit` tokens. Raises ApiError without a tokenizer."""
        self._check_length(text, "documents", limit)
        return await self._run(len(text), functools.partial(shortened, self.tokenizer, text, limit))

    def _check_length(self, text: str, field: str, limit: int | None) -> None:
        if self.tokenizer is None:
            raise ApiError(400, f"{field} must be token ids: this server runs without a tokenizer", field)
        if len(text) > self.max_characters and limit is None:
            raise ApiError(
                400,
                f"{field} has {len(text)} characters: more than {self.max_characters} cannot fit into the maximum"
                f" context length of {self.max_model_len} tokens",
                field,
            )

    async def chat(
        self,
        body: Conversation,
        special: bool | None = None,
        limit: int | None = None,
        side: str | None = None,
        **more: Any,
    ) -> list[int]:
        """Token ids of a conversation. Raises ApiError for an error of the template.

        limit, side: of tokenizer.encode; more: for the template
        """
        template = self._template(body)
        kwargs = {**more, **(body.chat_template_kwargs or {})}
        reserved = sorted(kwargs.keys() & self._reserved)
        if reserved:
            raise ApiError(400, f"chat_template_kwargs may not set {reserved[0]!r}", "chat_template_kwargs")
        tools = [t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None
        messages = [_for_template(i, m, template, self.placeholders) for i, m in enumerate(body.messages)]
        render = functools.partial(
            self.tokenizer.apply_chat_template, messages, tools=tools, documents=body.documents, tokenize=False,
            chat_template=template,
            add_generation_prompt=bool(body.add_generation_prompt) and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message), **kwargs,
        )  # fmt: skip
        try:
            text = await self._run(sum(len(str(m["content"])) for m in messages), render)
        except Exception as error:  # any exception of the template is about its input
            raise ApiError(400, _rejection(error, bool(body.continue_final_message)), "messages") from error
        return await self.text(text, bool(special), "messages", limit, side)

    def check_template(self, body: Conversation) -> None:
        """Raise ApiError for a request with a chat template of its own, unless the server trusts these."""
        if body.chat_template is not None and not self.trust_request_template:
            raise ApiError(
                400, "chat_template is not allowed in requests: start the server with --trust-request-chat-template",
                "chat_template",
            )  # fmt: skip

    def _template(self, body: Conversation) -> str:
        """The chat template of a conversation. Raises ApiError."""
        if body.chat_template is not None and self.tokenizer is not None:
            self.check_template(body)
            return body.chat_template
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
        try:
            return self.tokenizer.get_chat_template(tools=body.tools or None)
        except ValueError as error:  # several templates, and none is the default
            raise ApiError(400, f"no chat template fits these messages: {error}", "messages") from error

    def tail(self, ids: list[int]) -> str:
        """The last text of a prompt, where a template may begin or end the reasoning."""
        return "" if self.tokenizer is None else self.tokenizer.decode(ids[-16:], skip_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text of these tokens, including special ones. Raises ApiError for an unknown token id."""
        if self.tokenizer is None:
            raise ApiError(400, "this server runs without a tokenizer")
        size = len(self.tokenizer)
        wrong = next((i for i in ids if i >= size), None)
        if wrong is not None:
            raise ApiError(400, f"token id {wrong} is not in the vocabulary (0 to {size - 1})", "tokens")
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _for_template(
    index: int, message: Message, template: str, placeholders: Mapping[str, str]
) -> dict[str, Any]:
    """Convert a message to what the template reads, as vLLM does. Raises ApiError for an unknown role.

    Parts become lines of one text, unless the template loops over parts; an image is {"type": "image"} then (and a
    video or an audio in the same way), and a placeholder otherwise. A developer's message becomes a system
    message, unless the template names that role. Arguments of tool calls become objects.
    """
    found = message.for_template()
    found["role"] = _role(index, message.role, template)
    content = found["content"] or ""
    if isinstance(content, list):
        parts = [p if p["type"] == "text" else {"type": p["type"].removesuffix("_url")} for p in content]
        reads = templates.reads_parts(template)
        # Without a placeholder the model takes no such media, and the request is refused
        content = parts if reads else "\n".join(p.get("text", placeholders.get(p["type"], "")) for p in parts)
    found["content"] = content
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(found.get(name), str):  # templates use either name
            found.setdefault(other, found[name])
    calls = found.pop("tool_calls", None)
    if calls:  # an empty list would send some templates to their branch for calls
        found["tool_calls"] = calls
        for call in calls:
            call["function"]["arguments"] = _arguments(call["function"])
    return found


def _role(index: int, role: str, template: str) -> str:
    named = templates.names(template, role)
    if role == "developer" and not named:
        return "system"
    if role not in ROLES and not named:
        raise ApiError(
            400, f"messages[{index}].role is {shown(role)}: use one of {', '.join(ROLES)}; the chat template names no"
            " such role", f"messages[{index}].role",
        )  # fmt: skip
    return role


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call in a conversation; an empty object for a text that contains none, as in vLLM.

    A call that was cut off by max_tokens has such a text. An error would end its conversation for good.
    """
    given = function.get("arguments")
    if isinstance(given, dict):
        return given
    if given is None or not given.strip():
        return {}
    try:
        found = from_json(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        log.warning(
            "a conversation has a call of %s without a JSON object as arguments", shown(function["name"])
        )
        return {}
    return found


def _rejection(error: Exception, continued: bool) -> str:
    """The message to the client for an exception of a chat template. Its own words are Python's, or the template's."""
    if type(error) is jinja2.TemplateError:  # of raise_exception; what Jinja raises itself is a subclass
        return f"the chat template rejects these messages: {error}"
    log.info("a chat template failed", exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f" in line {f.lineno}" for f in reversed(frames) if f.filename == "<template>"), "")
    if continued and not line:
        return "the chat template does not end with the final message's text, so that it cannot be continued"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"the chat template is not valid Jinja: {error.message}, in line {error.lineno}"
    return (
        f"the chat template fails{line} on these messages: a field that it reads is missing or has another type; check"
        " messages, tools, documents and chat_template_kwargs"
    )
