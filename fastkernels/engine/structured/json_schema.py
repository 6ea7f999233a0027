"""JSON-schema keywords that structured outputs do not support."""

from __future__ import annotations

from typing import Any


def check_schema(schema: Any) -> None:
    """Raise ValueError for a schema with a keyword that would be ignored."""
