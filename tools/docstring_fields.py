"""A griffe extension for the docs site: lists in docstrings.

Our docstrings describe fields in aligned columns, which Markdown would join into one paragraph:

    host      'vllm', 'sglang' or 'transformers'
    path      'module.path:Name' in the host

Each such line becomes an item of a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def as_list(text: str) -> str:
    """The docstring with aligned fields as a Markdown list; a single line that looks like one stays as it is."""
    lines, out, i = text.splitlines(), [], 0
    while i < len(lines):
        items: list[str] = []
        start = i
        while i < len(lines) and (match := FIELD.match(lines[i])):
            item, i = f"- `{match[1]}`: {match[2].strip()}", i + 1
            while i < len(lines) and lines[i].startswith("    ") and lines[i].strip():
                item, i = f"{item} {lines[i].strip()}", i + 1
            items.append(item)
        if len(items) > 1:
            out += ["", *items, ""]
        elif items:
            out += lines[start:i]
        if i < len(lines) and not FIELD.match(lines[i]):
            # a docstring's [T, H] is a shape, not a link
            out.append(re.sub(r"(?<![`\w\]])\[([A-Z0-9_, .x*+-]+)\](?![(\[`])", r"`[\1]`", lines[i]))
            i += 1
    return "\n".join(out)


class DocstringFields(griffe.Extension):
    """Applies `as_list` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)
