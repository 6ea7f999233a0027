"""Chat templates: reading a file or a text, and what their source says."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jinja2
from jinja2 import nodes

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own tag


def parse(template: str) -> nodes.Template:
    """Raises jinja2.TemplateSyntaxError."""
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))


def load(given: str) -> str:
    """The template in a file, or a text that is one, as vLLM tells them apart. Raises ValueError."""
    text = given
    if not any(char in given for char in "{}\n"):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{given!r} is neither a template nor a file that can be read: {error}"
            raise ValueError(f"--chat-template: {reason}") from error
    try:
        parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"--chat-template is not valid Jinja: {error.message}, in line {error.lineno}"
        ) from error
    return text


def names(template: str, word: str) -> bool:
    """Whether the template has this word as a string."""
    return any(f"{quote}{word}{quote}" in template for quote in "'\"")


@functools.lru_cache(maxsize=16)
def reads_parts(template: str) -> bool:
    """Whether a chat template loops over the parts of a message's content."""
    try:
        tree = parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    return any(_name(loop.iter) == "content" for loop in tree.find_all(nodes.For))


def _name(of: nodes.Node) -> str | None:
    """The name that a Jinja node ends with: content in `content`, `m.content` and `m["content"]`."""
    if isinstance(of, nodes.Getitem):
        return of.arg.value if isinstance(of.arg, nodes.Const) else None
    return of.attr if isinstance(of, nodes.Getattr) else of.name if isinstance(of, nodes.Name) else None
