"""GET /fastkernels on a patched vLLM server: the report of all workers as JSON.

vLLM loads plugins of the group `vllm.endpoint_plugins` only if VLLM_PLUGINS names them. FASTKERNELS=1 is a choice by
name, too: with it, and VLLM_PLUGINS unset, `install` hands the plugin to vLLM's loader.
"""

from __future__ import annotations

import functools
import os
from importlib.metadata import entry_points
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.patch import Report, Request, find_host

GROUP, NAME, PATH = "vllm.endpoint_plugins", "fastkernels", "/fastkernels"


class StatusRoute:
    """vllm.plugins.endpoint_plugins.interface.EndpointPlugin, for every kind of server."""

    name = NAME
    required_tasks = None

    def __init__(self) -> None:
        self.client: Any = None

    def attach_router(self, app: Any) -> None:
        if Environment.read().enabled:  # asleep, the plugin adds nothing
            app.add_api_route(
                PATH, self.report, methods=["GET"], summary="The report of the FastKernels patch"
            )

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self.client = engine_client

    async def report(self) -> Any:
        from fastapi.responses import JSONResponse

        host = find_host("vllm")

        if self.client is None:
            return JSONResponse({"error": "this server has no engine: it only renders prompts"}, 503)
        try:
            replies = await host.call_async(self.client, Request("report"))
        except Exception as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 503)
        report = Report(host, self.client, replies)
        errors = {reply["rank"]: reply["error"] for reply in replies if reply["error"]}
        counts = {"verified": report.verified, "patched_modules": report.patched_modules, "errors": errors}
        return JSONResponse({**report.to_dict(), **counts})


def install() -> None:
    """Have vLLM's loader of endpoint plugins return ours where VLLM_PLUGINS is not set."""
    from vllm import plugins

    stock = plugins.load_endpoint_plugins
    if hasattr(stock, "fastkernels_stock"):
        return

    @functools.wraps(stock)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        if os.environ.get("VLLM_PLUGINS") is not None or not Environment.read().enabled:
            return stock(*args, **kwargs)  # type: ignore[no-any-return]
        others = {entry.name for entry in entry_points(group=GROUP)} - {NAME}
        return [*(stock(*args, **kwargs) if others else ()), StatusRoute()]

    load_endpoint_plugins.fastkernels_stock = stock  # type: ignore[attr-defined]
    plugins.load_endpoint_plugins = load_endpoint_plugins
