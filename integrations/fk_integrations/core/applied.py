"""A function that a request names, called with the model in a process of the host."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any


def apply(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"result": function(model, **arguments)}, which must be JSON.

    options: {"function": "package.module:name", "arguments": {name: value}}
    """
    function = pkgutil.resolve_name(options["function"])
    return {"result": function(model, **options["arguments"])}
