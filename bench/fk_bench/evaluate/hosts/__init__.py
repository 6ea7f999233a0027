"""The hosts of an item inside its process: engines that generate text, and models that are called with images."""

from __future__ import annotations

import importlib
from typing import Any

HOSTS = {
    "fastkernels": "text:Engine", "vllm": "text:Engine", "sglang": "text:SGLang", "transformers": "text:Transformers",
    "transformers/images": "images:Images", "timm": "images:Images",
}  # fmt: skip
NAMES = tuple(dict.fromkeys(name.partition("/")[0] for name in HOSTS))


def open_host(options: dict[str, Any]) -> Any:
    """The host of an item, with its model loaded. options: see `items.options_of`."""
    name = options["host"]
    key = f"{name}/{options['kind']}" if f"{name}/{options['kind']}" in HOSTS else name
    module, _, cls = HOSTS[key].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)(options)
