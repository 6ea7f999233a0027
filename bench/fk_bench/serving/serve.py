"""`fk-bench serve MODEL`: an OpenAI-compatible streaming server on our own engine."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar

import typer

from fastkernels.engine.http.requests.config import ServerConfig
from fastkernels.engine.options.config import EngineConfig
from fk_bench.core.terminal.panels import grouped

DEFAULT = EngineConfig(model="")
SERVER = ServerConfig()


@dataclass(frozen=True)
class ServerOptions:
    """Fields of ServerConfig."""

    PANEL: ClassVar[str | None] = None

    served_model_name: Annotated[
        str | None, typer.Option(help="name of the model for clients (default: MODEL)")
    ] = SERVER.served_model_name
    api_key: Annotated[
        str | None,
        typer.Option(envvar="FASTKERNELS_API_KEY", help="key that clients must send", show_default=False),
    ] = SERVER.api_key
    max_body_size: Annotated[int, typer.Option(min=1, help="bytes of a request's body")] = (
        SERVER.max_body_size
    )
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="seconds that running requests get after SIGTERM")
    ] = SERVER.drain_timeout
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds after which a client that does not read is dropped")
    ] = SERVER.stall_timeout
    timeout_keep_alive: Annotated[
        int, typer.Option(min=0, help="seconds before an idle connection is closed")
    ] = SERVER.timeout_keep_alive
    header_timeout: Annotated[
        float, typer.Option(min=0.1, help="seconds in which a connection must send a request's headers")
    ] = SERVER.header_timeout
    allowed_origins: Annotated[
        str, typer.Option(help="JSON list of origins that browsers may call from (CORS), such as '[\"*\"]'")
    ] = "[]"
    allow_credentials: Annotated[
        bool, typer.Option("--allow-credentials", help="CORS: allow cookies and authorization headers")
    ] = SERVER.allow_credentials
    allowed_methods: Annotated[str, typer.Option(help="CORS: JSON list of methods")] = '["*"]'
    allowed_headers: Annotated[str, typer.Option(help="CORS: JSON list of headers")] = '["*"]'
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="format of tool calls: hermes, llama3_json, mistral, qwen3_coder or qwen3_xml"
            " (default: detected from the chat template)"
        ),
    ] = SERVER.tool_call_parser
    reasoning_parser: Annotated[
        str | None, typer.Option(help="separate the reasoning of answers: deepseek_r1 or qwen3")
    ] = SERVER.reasoning_parser
    chat_template: Annotated[
        str | None,
        typer.Option(help="file of a chat template, or its text in Jinja (default: the tokenizer's)"),
    ] = SERVER.chat_template
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="requests may bring their own chat template")
    ] = SERVER.trust_request_chat_template
    enable_tokenizer_info_endpoint: Annotated[
        bool, typer.Option("--enable-tokenizer-info-endpoint", help="serve /tokenizer_info")
    ] = SERVER.enable_tokenizer_info_endpoint
    allowed_local_media_path: Annotated[
        str | None, typer.Option(help="folder of which `file://` URLs of media are read (default: none)")
    ] = SERVER.allowed_local_media_path
    allowed_media_domains: Annotated[
        str,
        typer.Option(help="JSON list of hosts whose URLs of images are downloaded (default: only data URLs)"),
    ] = "[]"
    max_jobs: Annotated[int, typer.Option(min=1, help="videos that are kept, made or queued")] = (
        SERVER.max_jobs
    )
    job_ttl: Annotated[float, typer.Option(min=0, help="seconds until a finished video is deleted")] = (
        SERVER.job_ttl
    )
    max_job_bytes: Annotated[int, typer.Option(min=1, help="bytes of all files of videos")] = (
        SERVER.max_job_bytes
    )


@dataclass(frozen=True)
class EngineOptions:
    """Fields of EngineConfig, without the model."""

    PANEL: ClassVar[str | None] = None

    tokenizer: Annotated[str | None, typer.Option(help="folder or hub id (default: the model's)")] = (
        DEFAULT.tokenizer
    )
    skip_tokenizer_init: Annotated[
        bool, typer.Option("--skip-tokenizer-init", help="token ids in, token ids out")
    ] = DEFAULT.skip_tokenizer_init
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda if there is one)")] = (
        DEFAULT.device
    )
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16")] = DEFAULT.dtype
    max_model_len: Annotated[
        int | None, typer.Option(help="tokens of a sequence (default: the model's limit)")
    ] = DEFAULT.max_model_len
    max_num_seqs: Annotated[int, typer.Option(help="sequences that run at once")] = DEFAULT.max_num_seqs
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="tokens of one step: decodes and prompt chunks together")
    ] = DEFAULT.max_num_batched_tokens
    max_waiting: Annotated[
        int, typer.Option(help="sequences that may wait (a request has n); more are refused with 429")
    ] = DEFAULT.max_waiting
    max_pixels: Annotated[
        int | None, typer.Option(help="pixels of an image to generate (default: four times the model's size)")
    ] = DEFAULT.max_pixels
    max_steps: Annotated[int, typer.Option(help="denoising steps of an image to generate")] = (
        DEFAULT.max_steps
    )
    max_images: Annotated[int, typer.Option(help="n of a request for images")] = DEFAULT.max_images
    max_frames: Annotated[int, typer.Option(help="frames to generate of a request")] = DEFAULT.max_frames
    max_characters: Annotated[int, typer.Option(help="characters of a text to speak")] = (
        DEFAULT.max_characters
    )
    voices: Annotated[
        str | None,
        typer.Option(
            help="folder of voices for speech: NAME.safetensors, or NAME.wav with its text in NAME.txt"
        ),
    ] = DEFAULT.voices
    block_size: Annotated[int, typer.Option(help="tokens of one KV block")] = DEFAULT.block_size
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks (default: what fits)")] = (
        DEFAULT.num_blocks
    )
    num_snapshots: Annotated[
        int | None,
        typer.Option(help="snapshots of recurrent states in the prefix cache (default: by memory)"),
    ] = DEFAULT.num_snapshots
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="bytes of the KV cache (default: what fits)")
    ] = DEFAULT.kv_cache_memory
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="share of the GPU's memory that may be in use, other processes included")
    ] = DEFAULT.gpu_memory_utilization
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the model's), bfloat16 or fp8")] = (
        DEFAULT.kv_cache_dtype
    )
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(help="of recurrent states: auto (as in vLLM), float32, bfloat16 or float16")
    ] = DEFAULT.mamba_ssm_cache_dtype
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="share the KV blocks of common prompt prefixes")
    ] = DEFAULT.enable_prefix_caching
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            help="schedule a step while the previous one runs (default: on CUDA, unless drafts forbid it)"
        ),
    ] = DEFAULT.async_scheduling
    attention_backend: Annotated[
        str | None,
        typer.Option(
            help="fa3, triton, flashinfer or reference (default: the first that supports the model here)"
        ),
    ] = DEFAULT.attention_backend
    tensor_parallel_size: Annotated[
        int, typer.Option(help="GPUs (on the CPU: processes) that share each layer")
    ] = DEFAULT.tensor_parallel_size
    expert_parallel_size: Annotated[
        int,
        typer.Option(
            help="groups of ranks that have different experts (1: all ranks share each expert, or of data-parallel"
            " ranks, each has its own)"
        ),
    ] = DEFAULT.expert_parallel_size
    data_parallel_size: Annotated[
        int,
        typer.Option(
            help="ranks with requests and a KV cache of their own, which share the experts of a mixture; each has"
            " tensor-parallel-size GPUs"
        ),
    ] = DEFAULT.data_parallel_size
    nnodes: Annotated[
        int, typer.Option(help="machines that the ranks are on; run the command on each of them")
    ] = DEFAULT.nnodes
    node_rank: Annotated[
        int, typer.Option(help="this machine: 0 serves, and 1 and more run their ranks for it")
    ] = DEFAULT.node_rank
    master_addr: Annotated[str, typer.Option(help="address of node 0 that the other nodes reach")] = (
        DEFAULT.master_addr
    )
    master_port: Annotated[int, typer.Option(help="port on which node 0 waits for the other nodes")] = (
        DEFAULT.master_port
    )
    dist_timeout: Annotated[float, typer.Option(help="seconds that a node may come late")] = (
        DEFAULT.dist_timeout
    )
    limit_mm_per_prompt: Annotated[
        str | None,
        typer.Option(help="JSON of the media of a prompt, such as '{\"image\": 4}' (default: 999)"),
    ] = None
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="JSON of speculative decoding by prompt lookup, EAGLE-3 or a draft model, such as"
            ' \'{"method": "ngram", "num_speculative_tokens": 4}\' (default: none)'
        ),
    ] = None
    max_logprobs: Annotated[int, typer.Option(help="maximum logprobs of a request")] = DEFAULT.max_logprobs
    json_any_whitespace: Annotated[
        bool,
        typer.Option(
            "--json-any-whitespace",
            help="JSON of structured outputs may have whitespace between values (default: one line)",
        ),
    ] = DEFAULT.json_any_whitespace
    seed: Annotated[int, typer.Option(help="for dummy weights, and for requests without a seed")] = (
        DEFAULT.seed
    )
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights")] = DEFAULT.load_format
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="no CUDA graphs")] = (
        DEFAULT.enforce_eager
    )


@grouped
def serve(
    model: Annotated[str, typer.Argument(help="folder of a Hugging Face checkpoint, or a hub id")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free one")] = 8000,
    *,
    server: ServerOptions,
    engine: EngineOptions,
) -> None:
    """Serve MODEL over OpenAI's API until SIGTERM (requests may finish) or Ctrl-C. Routes: docs/serve.md.

    Language models have /v1/completions, /v1/chat/completions and others, Whisper has /v1/audio/transcriptions and
    /v1/audio/translations, CosyVoice3 has /v1/audio/speech, and encoders have /v1/embeddings, /score and others.
    Detectors have /v1/detections, recommenders /v1/scores, policies /v1/actions, scenes /v1/render, and
    models of point clouds and segmenters of images /v1/segmentations. Diffusion models have
    /v1/images/generations or /v1/videos, world models /v1/frames, and structure prediction
    /v1/structures.
    """
    from fastkernels.core.registry import UnknownName
    from fastkernels.engine.execution.follow import follow
    from fastkernels.engine.execution.nodes import listening
    from fastkernels.engine.execution.ranks import WorkerDied
    from fastkernels.engine.http import process
    from fastkernels.models.common.checkpoints.weights import CheckpointError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        lists = {
            name: _strings(f"--{name.replace('_', '-')}", getattr(server, name))
            for name in ("allowed_origins", "allowed_methods", "allowed_headers", "allowed_media_domains")
        }
        server_config = ServerConfig(**{**asdict(server), **lists})
        config = EngineConfig(**engine_fields(model, engine))
        if config.node_rank:
            return follow(config, server_config.drain_timeout)
        with listening(config), process.bind(host, port) as sock:
            status = process.serve(config, sock, server_config)
    except (CheckpointError, UnknownName, ValueError, OSError, WorkerDied) as error:
        typer.echo(f"fk-bench serve: {with_flags(str(error))}", err=True)
        raise typer.Exit(1) from error
    if status:
        raise typer.Exit(status)


def with_flags(message: str) -> str:
    """A message of the engine or the server with the flags of this command in place of their options' names."""
    names = {field.name for options in (ServerOptions, EngineOptions) for field in fields(options)}
    # An option of one word is an English word elsewhere in the message.
    first = re.match(r"[a-z]+", message)
    long = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    if first is not None and first.group() in names:
        message = f"--{message}"
    return re.sub(rf"(?<![\w./-])({long})\b", lambda m: f"--{m.group().replace('_', '-')}", message)


def engine_fields(model: str, options: EngineOptions) -> dict[str, Any]:
    """The fields of an EngineConfig. Raises ValueError."""
    found = {"model": model, **asdict(options)}
    for name in ("limit_mm_per_prompt", "speculative_config"):
        if (given := getattr(options, name)) is not None:
            try:
                found[name] = json.loads(given)
            except ValueError as error:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be a JSON object, got {given!r}") from error
    return found


def _strings(flag: str, text: str) -> tuple[str, ...]:
    """The strings of a JSON list, vLLM's form of these flags. Raises ValueError."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{flag} must be a JSON list of strings, such as '[\"*\"]', got {text!r}")
    return tuple(found)


serve_command = serve
