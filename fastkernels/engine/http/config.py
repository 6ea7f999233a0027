"""The server's configuration: what is about HTTP and not about the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """served_model_name: what clients call the model (default: config.model)
    api_key            needed for everything but /health, /ping, /version and /metrics; None: none is
    max_body_size      bytes of a request's body
    drain_timeout      seconds that running requests have after SIGTERM
    stall_timeout      seconds after which a client that does not read its stream is dropped
    timeout_keep_alive  seconds that an idle connection is kept
    """

    served_model_name: str | None = None
    api_key: str | None = None
    max_body_size: int = 32 << 20
    drain_timeout: float = 30.0
    stall_timeout: float = 60.0
    timeout_keep_alive: int = 60
