"""The hosts of an item inside its process: engines that answer requests, and models that are called with images."""

from __future__ import annotations

import importlib
from typing import Any

from fk_bench.evaluate.suites import LIBRARIES

CLASSES = {
    ("fastkernels", "text"): "text:Engine", ("fastkernels", "requests"): "requests:Requests",
    ("vllm", "text"): "text:Engine", ("sglang", "text"): "text:SGLang",
    ("transformers", "text"): "text:Transformers", ("transformers", "images"): "images:Images",
    ("fla", "text"): "text:Fla", ("timm", "images"): "images:Images", ("diffusers", "images"): "images:Images",
    **{(host, "requests"): "libraries:Library" for host in sorted({*LIBRARIES.values()})},
}  # fmt: skip


def open_host(options: dict[str, Any]) -> Any:
    """The host of an item, with its model loaded. options: see `items.options_of`."""
    module, _, cls = CLASSES[options["host"], options["kind"]].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)(options)
