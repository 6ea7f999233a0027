"""Unsupported fields of OpenAI, vLLM and SGLang, which are accepted with values that have no effect."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable
from typing import Any

from pydantic_core import PydanticCustomError

ANYTHING = ("anything",)  # the field never changes the output

# {field: values without effect}. null is always accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "user": ANYTHING, "metadata": ANYTHING, "store": ANYTHING, "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING, "prompt_cache_retention": ANYTHING, "service_tier": ANYTHING,
    "prediction": ANYTHING, "parallel_tool_calls": ANYTHING, "verbosity": ("medium",), "modalities": (["text"],),
    "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"),
    "audio": (), "moderation": (), "web_search_options": (), "prompt_cache_options": (),
    # vLLM
    "use_beam_search": (False,), "length_penalty": ANYTHING, "early_stopping": ANYTHING, "watermarking": (False,),
    "spaces_between_special_tokens": ANYTHING,
    "logprob_token_ids": ([],), "prompt_embeds": (),
    "guided_decoding_backend": ANYTHING, "request_id": ANYTHING,
    "session_id": ANYTHING, "return_weight_versions": (False,), "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,), "return_prompt_text": (False,), "mm_payload": ANYTHING,
    "return_mm_kwargs": ANYTHING, "cache_salt": (), "kv_transfer_params": (), "ec_transfer_params": (),
    "vllm_xargs": ({},), "repetition_detection": (), "thinking_token_budget": (-1,), "stream_interval": ANYTHING,
    "chat_template": (), "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "include_reasoning": ANYTHING,
    "return_assistant_tokens_mask": (False,),
    "padding": ("do_not_pad",), "embed_dtype": ("float32",), "endianness": ("native", "little"),
    "instruction": (), "chat_template_kwargs": ({},), "encoding_format": ("float",),
    # Of diffusion language models, which serve them
    "block_length": (), "steps": (), "threshold": (), "remasking": (), "cfg_scale": (0, 0.0), "block_cache": ("none",),
    # SGLang
    "rid": ANYTHING, "extra_key": (), "lora_path": (),
    "stop_regex": ([], ""), "no_stop_trim": (False,), "session_params": ({},), "custom_params": ({},),
    "custom_logit_processor": (), "custom_labels": ANYTHING, "watermark": (), "images_config": (),
    "video_config": (), "data_parallel_rank": (), "return_hidden_states": (False,),
    "return_routed_experts": (False,), "routed_experts_start_len": (0,), "return_cached_tokens_details": ANYTHING,
    "return_spec_tokens_details": ANYTHING, "separate_reasoning": ANYTHING, "stream_reasoning": ANYTHING,
    "return_meta_info": (False,),
}  # fmt: skip


def check_and_drop(data: Any, served: Iterable[str]) -> dict[str, Any]:
    """The supported fields of a body. Raises PydanticCustomError for an unknown field or an unsupported value.

    Raises ValueError for a body that is not a JSON object.
    """
    if not isinstance(data, dict):
        raise ValueError("must be a JSON object")
    known = set(served)
    for name in data.keys() - known:
        if name not in NEUTRAL:
            raise field_error(name, f"unknown field {shown(name)}{_nearest(str(name), known)}")
        allowed, value = NEUTRAL[name], data[name]
        if value is not None and allowed is not ANYTHING and not any(_same(value, a) for a in allowed):
            choices = ", ".join(["null", *map(shown, allowed)])
            raise field_error(name, f"{name} is not supported: it may be {choices}, got {shown(value)}")
    return {name: data[name] for name in data.keys() & known}


def _same(value: Any, allowed: Any) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def add_to_schema(schema: dict[str, Any]) -> None:
    """Add the unsupported fields to a JSON schema."""
    for name, allowed in NEUTRAL.items():
        values = {} if allowed is ANYTHING else {"enum": [None, *allowed]}
        schema["properties"].setdefault(
            name, {"description": "Not supported: accepted and ignored.", **values}
        )


def _nearest(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def field_error(name: str, message: str) -> PydanticCustomError:
    """A validation error of this field, with the complete message for the client."""
    # Passed as a value: braces in the message are not placeholders.
    return PydanticCustomError("field", "{message}", {"message": message, "param": str(name)[:100]})


class _Json(reprlib.Repr):
    """Shortens values as reprlib does, and writes what JSON and Python spell differently as JSON does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_str(self, value: str, level: int) -> str:
        most = self.maxstring
        if len(value) > most:
            value = f"{value[: most // 2]}...{value[-(most // 2) :]}"
        return json.dumps(value, ensure_ascii=False)


shown = _Json().repr  # a value in a message to the client, shortened
