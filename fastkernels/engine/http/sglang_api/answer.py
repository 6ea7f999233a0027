"""The answer to a request to /generate, complete or as events. Each event holds all text so far, as at SGLang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastkernels.engine.http.answers.logprobs import json_number
from fastkernels.engine.http.answers.responses import Answer, Outputs, Prompt, event
from fastkernels.engine.http.sglang_api.protocol import SglangRequest
from fastkernels.engine.scheduling.request import CompletionOutput, Logprob


class SglangAnswer(Answer):
    def __init__(
        self, answer_id: str, model: str, completion: Any, prompts: list[Prompt], spell: Any,
        request: SglangRequest,
    ):  # fmt: skip
        super().__init__(answer_id, model, completion, prompts, spell)
        self.request, self._started = request, time.perf_counter()
        self._so_far: dict[int, dict[str, Any]] = {}  # by choice

    def whole(self, outputs: Outputs) -> Any:
        found = []
        for prompt, output in sorted(outputs, key=lambda item: item[0]):
            self._note(prompt, output)
            found += [self._state(prompt, out) for out in sorted(output.outputs, key=lambda o: o.index)]
        return found if self.request.is_batch else found[0]

    def events(self, outputs: Outputs) -> bytes:
        events = b""
        for prompt, output in outputs:
            self._note(prompt, output)
            for out in output.outputs:
                body = self._state(prompt, out)
                if self.request.is_batch:
                    body = {**body, "index": prompt * self.n + out.index}
                events += event(body)
        return events

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def _state(self, prompt: int, out: CompletionOutput) -> dict[str, Any]:
        """The choice with everything so far."""
        index, of = prompt * self.n + out.index, self.prompts[prompt]
        state = self._so_far.setdefault(index, {"text": "", "output_ids": [], "logprobs": [], "top": []})
        state["text"] += out.text
        state["output_ids"] += out.token_ids
        meta: dict[str, Any] = {
            "id": f"{self.id}-{index}" if self.request.is_batch else self.id,
            "finish_reason": self._reason(out),
            "prompt_tokens": len(of.token_ids), "completion_tokens": out.num_tokens,
            "cached_tokens": of.num_cached, "e2e_latency": time.perf_counter() - self._started,
        }  # fmt: skip
        if self.request.return_logprob:
            entries = out.logprobs or ()
            state["logprobs"] += [self._one(i, e[i]) for i, e in zip(out.token_ids, entries, strict=True)]
            state["top"] += [self._top(entry) for entry in entries]
            meta["output_token_logprobs"] = list(state["logprobs"])
            meta["input_token_logprobs"], tops = self._of_prompt(of)
            if self.request.top_logprobs_num:
                meta["output_top_logprobs"], meta["input_top_logprobs"] = list(state["top"]), tops
        return {"text": state["text"], "output_ids": list(state["output_ids"]), "meta_info": meta}

    @staticmethod
    def _reason(out: CompletionOutput) -> dict[str, Any] | None:
        if out.finish_reason is None:
            return None
        more: dict[str, dict[str, Any]] = {
            "stop": {"matched": out.stop_reason},
            "length": {"length": out.num_tokens},
        }
        return {"type": out.finish_reason, **more.get(out.finish_reason, {})}

    def _of_prompt(self, prompt: Prompt) -> tuple[list[Any], list[Any]]:
        """Log-probabilities of the prompt's tokens from logprob_start_len on."""
        start = self.request.logprob_start_len
        if start is None or start < 0 or prompt.logprobs is None:
            return [], []
        pairs = list(zip(prompt.token_ids, prompt.logprobs, strict=True))[start:]
        return (
            [self._one(i, e[i] if e else None) for i, e in pairs],
            [self._top(e) if e else None for _, e in pairs],
        )

    def _top(self, entry: dict[int, Logprob]) -> list[Sequence[Any]]:
        top = sorted(entry.items(), key=lambda item: -item[1].logprob)[: self.request.top_logprobs_num or 0]
        return [self._one(i, e) for i, e in top]

    def _one(self, token_id: int, logprob: Logprob | None) -> Sequence[Any]:
        text = self.spell(token_id, None) if self.request.return_text_in_logprobs else None  # of it alone
        return [None if logprob is None else json_number(logprob), token_id, text]
