"""Tokenizes prompts: text, and conversations with the model's chat template."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes

from fastkernels.engine.http.errors import ApiError
from fastkernels.engine.http.protocol import Conversation
from fastkernels.engine.tokenizer import encode

SMALL = 4096  # characters tokenized in the event loop (about 1 ms); longer texts go to a thread
T = TypeVar("T")


class Prompts:
    """Tokenizes for one model. Long texts share one thread, because a tokenizer is not safe in several."""

    def __init__(self, tokenizer: Any, max_model_len: int):
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
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
        """Parameters of apply_chat_template, which chat_template_kwargs must not set."""
        return frozenset(inspect.signature(self.tokenizer.apply_chat_template).parameters)

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
        if self.tokenizer is None:
            raise ApiError(400, f"{field} must be token ids: this server runs without a tokenizer", field)
        if len(text) > self.max_characters and limit is None:
            raise ApiError(
                400,
                f"{field} has {len(text)} characters: more than {self.max_characters} cannot fit into the maximum"
                f" context length of {self.max_model_len} tokens",
                field,
            )
        return await self._run(
            len(text), functools.partial(encode, self.tokenizer, text, special, limit, side)
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
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; use /v1/completions", "messages")
        kwargs = {**more, **(body.chat_template_kwargs or {})}
        reserved = sorted(kwargs.keys() & self._reserved)
        if reserved:
            raise ApiError(400, f"chat_template_kwargs may not set {reserved[0]!r}", "chat_template_kwargs")
        tools = [t.model_dump(exclude_none=True) for t in body.tools] if body.tools else None
        try:
            template = self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:  # several templates, and none is the default
            raise ApiError(400, f"no chat template fits these messages: {error}", "messages") from error
        messages = [
            _for_template(i, m.model_dump(exclude_unset=True), template) for i, m in enumerate(body.messages)
        ]
        render = functools.partial(
            self.tokenizer.apply_chat_template, messages, tools=tools, documents=body.documents, tokenize=False,
            add_generation_prompt=bool(body.add_generation_prompt) and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message), **kwargs,
        )  # fmt: skip
        try:
            text = await self._run(sum(len(str(m["content"])) for m in messages), render)
        except Exception as error:  # any exception of the template is about its input
            raise ApiError(400, f"the chat template rejects these messages: {error}", "messages") from error
        return await self.text(text, bool(special), "messages", limit, side)

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


@functools.lru_cache(maxsize=16)
def _reads_parts(template: str) -> bool:
    """Whether a chat template loops over the parts of a message's content."""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:  # tags of other extensions
        return False
    return any(_name(loop.iter) == "content" for loop in tree.find_all(nodes.For))


def _name(of: nodes.Expr) -> str | None:
    """The name that a Jinja expression ends with: content in `content`, `m.content` and `m["content"]`."""
    if isinstance(of, nodes.Getitem):
        return of.arg.value if isinstance(of.arg, nodes.Const) else None
    return of.attr if isinstance(of, nodes.Getattr) else of.name if isinstance(of, nodes.Name) else None


def _for_template(index: int, message: dict[str, Any], template: str) -> dict[str, Any]:
    """Convert a message to what the template reads, as vLLM does.

    Parts become lines of one text, unless the template loops over parts. A developer's message becomes a system
    message, unless the template names that role. Arguments of tool calls become objects.
    """
    content = message.get("content") or ""
    if isinstance(content, list) and not _reads_parts(template):
        content = "\n".join(part["text"] for part in content)
    message["content"] = content
    if message["role"] == "developer" and not any(f"{q}developer{q}" in template for q in "'\""):
        message["role"] = "system"
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(message.get(name), str):  # templates use either name
            message.setdefault(other, message[name])
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError as error:
                raise ApiError(
                    400, f"messages[{index}]: the arguments of a tool call are not JSON: {error}", "messages"
                ) from error
    return message
