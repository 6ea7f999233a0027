"""Offline inference: LLM(model).generate(prompts, SamplingParams(...))."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .config import EngineConfig
from .llm_engine import LLMEngine
from .request import RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams

Prompt: TypeAlias = "str | Sequence[int]"


class LLM:
    """A model that generates, in this process (and in workers, with tensor_parallel_size; `shutdown` ends them).
    Keyword arguments are the fields of EngineConfig.

    Raises CheckpointError for a checkpoint that cannot be loaded, UnknownName for an unknown architecture, ValueError
    for values that no engine can have and for a model that does not fit, WorkerDied if a worker ends.
    """

    def __init__(self, model: str, **config: Any):
        self.llm_engine = LLMEngine(EngineConfig(model=str(model), **config))
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def shutdown(self) -> None:
        """End the processes of other ranks. The engine cannot be used after it."""
        self.llm_engine.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order.

        prompts          text, token ids, or a list of either
        sampling_params  one for all prompts, or one for each (default: SamplingParams(), 16 tokens at most)

        Raises ValueError for what cannot be served, before anything runs. A step that fails ends all requests, and so
        does Ctrl-C.
        """
        prompts = _as_list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(each)} sampling_params: give one, or one for each"
            )
        engine = self.llm_engine
        ids = [str(next(self._ids)) for _ in prompts]
        # All are checked before the first is queued: a bad prompt leaves nothing behind.
        final = {id(s): replace(s, output_kind=RequestOutputKind.FINAL_ONLY) for s in each}
        requests = [
            engine.make_request(i, p, final[id(s)]) for i, p, s in zip(ids, prompts, each, strict=True)
        ]
        done: dict[str, RequestOutput] = {}
        waiting = list(reversed(requests))
        try:
            while waiting or engine.has_unfinished_requests():
                while waiting and engine.has_room(waiting[-1]):
                    request = waiting.pop()
                    engine.add_request(request.request_id, request)
                done.update((o.request_id, o) for o in engine.step() if o.finished)
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
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        if not all(isinstance(m, dict) for c in conversations for m in c):
            raise ValueError(
                "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists"
            )
        prompts = [
            tokenizer.apply_chat_template(
                c, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True, **template
            )["input_ids"]
            for c in conversations
        ]
        return self.generate(prompts, sampling_params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
