"""SGLang's routes."""

from __future__ import annotations

import json
import uuid
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError

from fastkernels import __version__
from fastkernels.engine.http.answers.responses import Prompt
from fastkernels.engine.http.requests.errors import ApiError
from fastkernels.engine.http.requests.protocol import CompletionRequest
from fastkernels.engine.http.routes.generation import Generation
from fastkernels.engine.http.sglang_api import schema
from fastkernels.engine.http.sglang_api.answer import SglangAnswer
from fastkernels.engine.http.sglang_api.protocol import DEFAULT_TOKENS, SglangRequest, SglangSampling

NAMES = {  # of a completion, by SGLang's name where it differs
    "min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}  # fmt: skip


class Sglang(Generation):
    PATHS = (("/generate", "generate", schema.GENERATE),)
    GET_PATHS = (
        ("/model_info", "model_info", schema.MODEL_INFO),
        ("/get_model_info", "model_info", schema.MODEL_INFO),
        ("/server_info", "server_info", schema.SERVER_INFO),
        ("/get_server_info", "server_info", schema.SERVER_INFO),
    )

    async def model_info(self) -> dict[str, Any]:
        llm, config = self.context.llm, self.context.config
        hf = llm.engine.hf_config
        return {
            "model_path": llm.config.model, "served_model_name": self.context.model_name,
            "tokenizer_path": llm.config.tokenizer or llm.config.model, "is_generation": True,
            "load_format": llm.config.load_format, "reasoning_parser": config.reasoning_parser,
            "tool_call_parser": config.tool_call_parser, "model_type": getattr(hf, "model_type", None),
            "architectures": getattr(hf, "architectures", None),
        }  # fmt: skip

    async def server_info(self) -> dict[str, Any]:
        """internal_states is empty: SGLang's clients look there for what this engine does not have."""
        return {
            **await self.model_info(), "version": __version__, "tp_size": self.context.llm.config.tensor_parallel_size,
            "max_total_num_tokens": self._num_kv_tokens(), "context_length": self.context.llm.engine.max_model_len,
            "internal_states": [],
        }  # fmt: skip

    def _num_kv_tokens(self) -> int:
        engine = self.context.llm.engine
        without_blocks = engine.config.max_num_seqs * engine.max_model_len
        return engine.scheduler.num_cache_tokens or without_blocks

    async def generate(self, body: SglangRequest, raw: Request) -> Response:
        self.context.check_model(body.model)
        prompts = []
        for given in body.prompts:
            ids = given if isinstance(given, list) else await self.context.prompts.text(given, True, "text")
            prompts.append(Prompt(ids))
        if isinstance(body.sampling_params, list):
            bodies = [
                self._completion(body, params, [prompt], (i,))
                for i, (params, prompt) in enumerate(zip(body.sampling_params, prompts, strict=True))
            ]
        else:
            params = body.sampling_params or SglangSampling.model_validate({})
            bodies = [self._completion(body, params, prompts)] * len(prompts)
        answer = SglangAnswer(
            body.rid or uuid.uuid4().hex, self.context.model_name, bodies[0], prompts, self._spell(bodies[0]), body
        )  # fmt: skip
        try:
            return await self._answer(answer, bodies[0], raw, bodies=bodies)
        except ApiError as error:  # by SGLang's name of the field
            name = next((k for k, v in NAMES.items() if v == error.param), None)
            if name is None:
                raise
            message = str(error.detail).replace(str(error.param), name)
            raise ApiError(error.status_code, message, f"sampling_params.{name}") from error

    def _completion(
        self, body: SglangRequest, given: SglangSampling, prompts: list[Prompt], where: tuple[int, ...] = ()
    ) -> CompletionRequest:
        """The completion of these prompts. where: the place of `given` in sampling_params, if that is a list.

        Raises RequestValidationError.
        """
        completion = {NAMES.get(k, k): v for k, v in given.model_dump(exclude_unset=True).items()}
        if completion.get("max_tokens") is None:
            room = self.context.llm.engine.max_model_len - max(len(p.token_ids) for p in prompts)
            completion["max_tokens"] = max(1, min(DEFAULT_TOKENS, room))
        if body.return_logprob:
            completion["logprobs"] = body.top_logprobs_num or 0
            if (body.logprob_start_len or 0) >= 0:
                completion["prompt_logprobs"] = body.top_logprobs_num or 0
        # Token ids, so that nothing is tokenized again.
        completion["prompt"] = [p.token_ids for p in prompts]
        completion |= {"stream": bool(body.stream), "priority": body.priority or 0}
        try:
            made = CompletionRequest.model_validate(completion)
        except ValidationError as error:
            place = ("body", "sampling_params", *where)
            found: list[Any] = [{**e, "loc": (*place, *e["loc"])} for e in error.errors()]
            raise RequestValidationError(found) from error
        salts = [salt for salt in (body.cache_salt, body.extra_key) if salt is not None]
        return made.model_copy(update={"cache_salt": json.dumps(salts)}) if salts else made
