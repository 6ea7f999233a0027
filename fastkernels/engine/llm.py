"""Offline inference: LLM(model).generate(prompts, SamplingParams(...))."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from fastkernels.engine.config import EngineConfig
from fastkernels.engine.llm_engine import LLMEngine, is_integer
from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.request import RequestOutput

Prompt: TypeAlias = "str | Sequence[int] | dict[str, Any]"


class LLM:
    """A model that generates, in this process (and in workers, with tensor_parallel_size; `shutdown` ends them).
    Keyword arguments are the fields of EngineConfig.

        with LLM(model) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    Raises CheckpointError for a checkpoint that cannot be loaded, UnknownName for an unknown architecture, ValueError
    for values that no engine can have and for a model that does not fit, WorkerDied if a worker ends.
    """

    def __init__(self, model: str, **config: Any):
        self.llm_engine = LLMEngine(EngineConfig(model=str(model), **config))
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the processes of other ranks; of an LLM that has some, nothing can be asked after it. Safe to repeat."""
        self.llm_engine.shutdown()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order.

        prompts          text, token ids, {'prompt': text}, {'prompt_token_ids': ids}, or a list of these
        sampling_params  one for all prompts, or one for each (default: SamplingParams(), 16 tokens at most)

        Raises ValueError for what cannot be served, before anything runs. A step that fails ends all requests, and so
        does Ctrl-C.
        """
        listed = _as_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(listed) if isinstance(params, SamplingParams) else list(params)
        for one in each:
            if not isinstance(one, SamplingParams):
                raise ValueError(f"sampling_params must be SamplingParams, got {reprlib.repr(one)}")
        if len(each) != len(listed):
            raise ValueError(
                f"{len(listed)} prompts and {len(each)} sampling_params: give one, or one for each"
            )
        engine = self.llm_engine
        ids = [str(next(self._ids)) for _ in listed]
        # All are checked before the first is queued: a bad prompt leaves nothing behind.
        final = {id(s): replace(s, output_kind=RequestOutputKind.FINAL_ONLY) for s in each}
        requests = [
            engine.make_request(i, p, final[id(s)]) for i, p, s in zip(ids, listed, each, strict=True)
        ]
        done: dict[str, RequestOutput] = {}
        waiting = list(reversed(requests))
        try:
            while waiting or engine.has_unfinished_requests():
                while waiting and engine.has_room(waiting[-1]):
                    request = waiting.pop()
                    engine.add_request(request.request_id, request)
                done.update((o.request_id, o) for o in engine.step() if o.finished)
                engine.take_stats()  # nobody reads them here, and they would pile up
        except BaseException:
            engine.abort_all()  # a step may have been scheduled and not run: its blocks hold nothing
            raise
        return [done[i] for i in ids]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """messages: one conversation, [{'role': ..., 'content': ...}, ...], or a list of them. `template` goes to the
        tokenizer's chat template. Raises ValueError for what cannot be served, before anything runs.
        """
        tokenizer = self.get_tokenizer()
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate")
        prompts = [
            tokenizer.apply_chat_template(
                c, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, **template
            )["input_ids"]
            for c in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params)


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, dict)):
        prompts = [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be text, token ids or a list of these, got {reprlib.repr(prompts)}")
    listed = list(prompts)
    if listed and is_integer(listed[0]):
        listed = [listed]
    return [_unwrapped(p) for p in listed]


def _unwrapped(prompt: Any) -> Any:
    """What is in vLLM's TextPrompt or TokensPrompt."""
    if isinstance(prompt, dict):
        return next((prompt[k] for k in ("prompt_token_ids", "prompt") if k in prompt), prompt)
    return prompt


def _conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        raise ValueError(
            f"messages must be a list of messages, or of such lists, got {reprlib.repr(messages)}"
        )
    listed = [messages] if messages and isinstance(messages[0], dict) else list(messages)
    for conversation in listed:
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise ValueError(f"a conversation must be a list of messages, got {reprlib.repr(conversation)}")
        for message in conversation:
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(
                    f"a message must be {{'role': ..., 'content': ...}}, got {reprlib.repr(message)}"
                )
    return listed
