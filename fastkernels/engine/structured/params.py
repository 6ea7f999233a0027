"""The parameters of a structured output. Names and meanings are vLLM's."""

from __future__ import annotations

import json as jsonlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastkernels.engine.structured.json_schema import check_schema

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_LENGTH = 1 << 20  # characters of a schema, regular expression or grammar
MAX_CHOICES = 10_000


@dataclass
class StructuredOutputsParams:
    """The form of an output; exactly one kind is given.

    json            an instance of a JSON schema, given as text or as an object
    regex           a match of a regular expression, from its first to its last character
    choice          one of some strings
    grammar         a sentence of a context-free grammar, in GBNF (root ::= ...) or in Lark's syntax (start: ...)
    json_object     True: any JSON object
    structural_tag  free text with parts that follow a schema or grammar, in xgrammar's format, as text or as an object
    disable_any_whitespace  True: JSON in one line, with one space after each comma and colon; False: any whitespace
                            between values; None: as the engine's json_any_whitespace says

    Raises ValueError for anything else, and for a JSON schema with keywords that are not supported.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(KINDS)}, got {found}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise ValueError(_message(name, f"must be true or false, got {_short(getattr(self, name))}"))
        for name in ("disable_additional_properties", "whitespace_pattern"):
            if getattr(self, name):
                raise ValueError(_message(name, "is not supported; write it into the schema"))
        self.kind = given[0]
        self.text = getattr(self, f"_{self.kind}")()
        if len(self.text) > MAX_LENGTH:
            raise ValueError(_message(self.kind, f"has {len(self.text)} characters, at most {MAX_LENGTH}"))

    def _json(self) -> str:
        schema = self._object("json", self.json)
        check_schema(schema)
        return jsonlib.dumps(schema)

    def _json_object(self) -> str:
        if self.json_object is not True:
            raise ValueError(
                _message("json_object", f"must be true if it is set, got {_short(self.json_object)}")
            )
        return '{"type": "object"}'

    def _regex(self) -> str:
        return self._text("regex", self.regex, empty=True)

    def _grammar(self) -> str:
        return self._text("grammar", self.grammar)

    def _choice(self) -> str:
        choices = self.choice
        if not isinstance(choices, (list, tuple)) or not choices:
            raise ValueError(
                _message("choice", f"must be a list of strings, not empty, got {_short(choices)}")
            )
        if len(choices) > MAX_CHOICES:
            raise ValueError(
                _message("choice", f"has {len(choices)} entries, at most {MAX_CHOICES} are allowed")
            )
        for entry in choices:
            if not isinstance(entry, str) or not entry:
                raise ValueError(
                    _message("choice", f"must hold strings that are not empty, got {_short(entry)}")
                )
            self._text("choice", entry)
        return "root ::= " + " | ".join(f'"{_escaped(entry)}"' for entry in choices)

    def _structural_tag(self) -> str:
        tag = self._object("structural_tag", self.structural_tag)
        if not isinstance(tag, dict):
            raise ValueError(_message("structural_tag", f"must be a JSON object, got {_short(tag)}"))
        if "structures" in tag:
            tag = _triggered_tags(tag)
        return jsonlib.dumps(tag)

    @staticmethod
    def _object(name: str, value: Any) -> Any:
        """A JSON value that is given as text or as itself."""
        if isinstance(value, str):
            StructuredOutputsParams._text(name, value)
            try:
                return jsonlib.loads(value)
            except ValueError as error:
                raise ValueError(_message(name, f"is not JSON: {error}, got {_short(value)}")) from error
            except RecursionError as error:
                raise ValueError(_message(name, "is nested too deeply")) from error
        try:
            return jsonlib.loads(jsonlib.dumps(value))
        except (TypeError, ValueError) as error:
            raise ValueError(_message(name, f"is not JSON: {error}, got {_short(value)}")) from error
        except RecursionError as error:
            raise ValueError(_message(name, "is nested too deeply")) from error

    @staticmethod
    def _text(name: str, value: Any, empty: bool = False) -> str:
        if not isinstance(value, str) or not (value.strip() or empty):
            raise ValueError(
                _message(name, f"must be a text{'' if empty else ', not empty'}, got {_short(value)}")
            )
        if "\0" in value:
            raise ValueError(_message(name, f"must not contain a NUL character, got {_short(value)}"))
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(_message(name, f"is not valid Unicode text: {error}")) from error
        return value


def _triggered_tags(tag: dict[str, Any]) -> dict[str, Any]:
    """A tag of the older form {"structures": [{"begin", "schema", "end"}], "triggers": [...]} in the present one."""
    try:
        tags = [
            {
                "begin": s["begin"],
                "content": {"type": "json_schema", "json_schema": s["schema"]},
                "end": s["end"],
            }
            for s in tag["structures"]
        ]
        content = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise ValueError(
            _message(
                "structural_tag", f"needs triggers, and structures with begin, schema and end: {error!r}"
            )
        ) from error
    return {"type": "structural_tag", "format": content}


def _message(name: str, what: str) -> str:
    return f"structured_outputs: {name} {what}"


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _escaped(text: str) -> str:
    """As the content of a string in GBNF."""
    return "".join(f"\\u{ord(c):04x}" if c in '"\\' or ord(c) < 0x20 or ord(c) == 0x7F else c for c in text)
