"""A tool call as a JSON object, {"name": ..., "arguments": {...}}, read as it arrives."""

from __future__ import annotations

import json

KEYS = ("arguments", "parameters")


class JsonCall:
    """Scans one object. `ready` as soon as its name and the beginning of its arguments are known.

    raw       everything that was consumed
    name      the call's name; None: not known yet
    done      the object is complete
    failed    the text is not such an object
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.done = self.failed = False
        self._where = "start"
        self._key = self._value = ""
        self._depth, self._string, self._escape = 0, False, False
        self._arguments: str | None = None  # the text of the value; a growing part of it until complete
        self._complete = False  # whether _arguments is
        self._sent = 0

    @property
    def ready(self) -> bool:
        return self.name is not None and self._arguments is not None

    @property
    def complete(self) -> bool:
        """Whether the arguments are known to the end."""
        return self._complete and self._where == "next"

    def feed(self, text: str) -> str:
        """Consume up to the object's end. Returns the rest of the text; all of it is unused if `failed`."""
        for at, char in enumerate(text):
            if self.done or self.failed:
                return text[at:]
            self.raw += char
            self._step(char)
            if self.failed:
                self.raw = self.raw[:-1]
                return text[at:]
        return ""

    def take_arguments(self) -> str:
        """The arguments since the last call. A string is JSON in JSON: it is decoded, once it is complete."""
        text = self._arguments or ""
        if text.startswith('"'):
            if not self._complete:
                return ""
            text = json.loads(text)
        new, self._sent = text[self._sent :], len(text)
        return new

    def _step(self, char: str) -> None:
        if self._where == "value":
            self._in_value(char)
        elif self._where == "key":
            self._in_key(char)
        elif char.isspace():
            return
        elif self._where == "start" and char == "{":
            self._where = "next"
        elif self._where == "next" and char == "}":
            self._end()
        elif self._where == "next" and char == '"':
            self._where, self._key, self._escape = "key", "", False
        elif self._where == "next" and char == ",":
            return
        elif self._where == "colon" and char == ":":
            self._where = "before value"
        elif self._where == "before value" and char not in ",}]":
            self._where, self._value = "value", ""
            self._depth, self._string, self._escape = 0, False, False
            self._in_value(char)
        else:
            self.failed = True

    def _in_key(self, char: str) -> None:
        if char == '"' and not self._escape:
            self._where = "colon"
            return
        self._escape = char == "\\" and not self._escape
        self._key += char

    def _in_value(self, char: str) -> None:
        if self._string:
            self._value += char
            if self._escape:
                self._escape = False
            elif char == "\\":
                self._escape = True
            elif char == '"':
                self._string = False
                if self._depth == 0:
                    self._value_done()
        elif char in ",}]" and self._depth == 0:  # the end of a number, true, false or null
            self._value_done()
            if char == "}":
                self._end()
            elif char == "]":
                self.failed = True
            return
        else:
            self._value += char
            self._string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if char in "}]" and self._depth == 0:
                self._value_done()
        if self._key in KEYS and not self._complete:
            self._arguments = self._value

    def _value_done(self) -> None:
        self._where = "next"
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._key == "name" and isinstance(value, str):
            self.name = value
        elif self._key in KEYS:
            self._arguments, self._complete = self._value.strip(), True

    def _end(self) -> None:
        self.done = True
