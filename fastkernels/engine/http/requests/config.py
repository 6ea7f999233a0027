"""The server's HTTP options; engine options are in EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server.

    served_model_name   the model's name for clients (default: config.model)
    api_key             required for everything but the paths of gate.OPEN; None: no key is required
    max_body_size       maximum bytes of a request's body
    drain_timeout       seconds for running requests to finish after SIGTERM
    stall_timeout       seconds until a client that does not read its stream is disconnected
    timeout_keep_alive  seconds until an idle connection is closed
    header_timeout      seconds in which a connection must send the headers of a request
    allowed_origins     origins whose pages may call the server from a browser (CORS); '*': any, (): none
    allow_credentials, allowed_methods, allowed_headers  the other CORS options, as in vLLM
    tool_call_parser    name of the parser of tool calls (tools/); None: detected from the chat template
    chat_template       a file with a chat template, or its text; None: the tokenizer's
    trust_request_chat_template  whether requests may bring their own chat template, which is run in Jinja's sandbox
    enable_tokenizer_info_endpoint  serve /tokenizer_info, which shows the chat template
    allowed_media_domains  hosts whose http and https URLs of images are downloaded; (): none, only data URLs are read
    allowed_local_media_path  a folder of which `file://` URLs of media are read; None: none are
    max_jobs            videos or structures that are kept, made or queued; more are refused
    job_ttl             seconds until a finished one is deleted
    max_job_bytes       bytes of all their files; beyond them the oldest is deleted
    reasoning_parser    name of the parser of reasoning (reasoning/); None: reasoning stays in the content

    Raises ValueError for an empty key or name, since an empty key would be none, and for a path that is no folder.
    """

    served_model_name: str | None = None
    api_key: str | None = None
    max_body_size: int = 32 << 20
    drain_timeout: float = 30.0
    stall_timeout: float = 60.0
    timeout_keep_alive: int = 60
    header_timeout: float = 30.0
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_tokenizer_info_endpoint: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    max_jobs: int = 64
    job_ttl: float = 3600.0
    max_job_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("api_key", "served_model_name"):
            if (value := getattr(self, name)) is not None and not value.strip():
                raise ValueError(f"{name} is {value!r}: give one, or leave it out")
        if self.allowed_local_media_path is not None:
            folder = Path(self.allowed_local_media_path)
            if not folder.is_dir():
                raise ValueError(
                    f"allowed_local_media_path {str(folder)!r} is not a folder: give the folder of the files"
                )
            object.__setattr__(self, "allowed_local_media_path", str(folder.resolve()))
