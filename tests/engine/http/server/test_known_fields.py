"""No field of OpenAI's client or of vLLM 0.32's routes is unknown: it has an effect, or a reason to be refused."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_create_params

from fastkernels.engine.http.audio_api import protocol as audio
from fastkernels.engine.http.requests import protocol, unserved

OPENAI = [
    (protocol.ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase, unserved.NEUTRAL),
    (protocol.CompletionRequest, completion_create_params.CompletionCreateParamsBase, unserved.NEUTRAL),
    (protocol.EmbeddingRequest, embedding_create_params.EmbeddingCreateParams, unserved.NEUTRAL),
    (audio.TranscriptionRequest, transcription_create_params.TranscriptionCreateParamsBase, audio.NEUTRAL),
    (audio.TranslationRequest, translation_create_params.TranslationCreateParams, audio.NEUTRAL),
]
POOLING = (
    "model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt"
    " use_activation"
)
TEXTS = " input add_special_tokens"
VECTORS = " encoding_format embed_dtype endianness dimensions"
SCORES = " max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs"
SPEECH = (
    "model language hotwords prompt response_format stream stream_include_usage stream_continuous_usage_stats"
    " vllm_xargs to_language use_beam_search n length_penalty include_stop_str_in_output temperature watermarking top_p"
    " top_k min_p seed frequency_penalty repetition_penalty presence_penalty max_completion_tokens"
)
CHAT = (
    "messages model frequency_penalty logit_bias logprobs top_logprobs logprob_token_ids max_tokens"
    " max_completion_tokens n presence_penalty response_format seed stop stream stream_options temperature top_p tools"
    " tool_choice reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user best_of"
    " use_beam_search top_k min_p repetition_penalty watermarking length_penalty early_stopping stop_token_ids"
    " include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens"
    " truncate_prompt_tokens truncation_side prompt_logprobs allowed_token_ids bad_words echo add_generation_prompt"
    " continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs"
    " mm_processor_kwargs structured_outputs guided_decoding_backend priority request_id session_id"
    " return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text"
    " mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection"
    " stream_interval"
)
SIDES = "".join(f" {name}" for pair in protocol.SIDES for name in pair)
VLLM = [
    (protocol.ChatCompletionRequest, CHAT, unserved.NEUTRAL),
    (protocol.EmbeddingRequest, POOLING + TEXTS + VECTORS, unserved.NEUTRAL),
    (protocol.ClassificationRequest, POOLING + TEXTS, unserved.NEUTRAL),
    (protocol.PoolingTaskRequest, f"{POOLING + TEXTS + VECTORS} task", unserved.NEUTRAL),
    (protocol.ScoreRequest, POOLING + SCORES + SIDES, unserved.NEUTRAL),
    (protocol.RerankRequest, f"{POOLING + SCORES} query documents top_n", unserved.NEUTRAL),
    (audio.TranscriptionRequest, f"{SPEECH} timestamp_granularities", audio.NEUTRAL),
    (audio.TranslationRequest, SPEECH, audio.NEUTRAL),
]


@pytest.mark.parametrize(("form", "params", "neutral"), OPENAI, ids=lambda v: getattr(v, "__name__", ""))
def test_fields_of_openais_client_are_known(form: Any, params: Any, neutral: Any) -> None:
    assert set(params.__annotations__) - set(form.model_fields) - set(neutral) <= {"file"}


@pytest.mark.parametrize(("form", "names", "neutral"), VLLM, ids=lambda v: getattr(v, "__name__", "fields"))
def test_fields_of_vllm_are_known(form: Any, names: str, neutral: Any) -> None:
    assert set(names.split()) - set(form.model_fields) - set(neutral) == set()
