"""Values of flags as typed on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class ConfigError(ValueError):
    """An invalid option; the message is one line for the user."""


def comma_list(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """'1,8' -> (1, 8). Raises ConfigError with the flag and the value."""
    values = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        try:
            values.append(kind(part))
        except ValueError:
            what = {"int": "a whole number", "float": "a number"}.get(
                getattr(kind, "__name__", ""), "a value"
            )
            raise ConfigError(f"{flag}: {part!r} is not {what}") from None
    return tuple(values)


def json_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object given on the command line. Raises ConfigError with the flag and the value."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be an object of arguments, got {text}")
    return found


def per_lane(flag: str, items: Iterable[str]) -> dict[str, str]:
    """['vllm=PATH'] -> {'vllm': 'PATH'}. Raises ConfigError."""
    found = {}
    for item in items:
        lane, equals, value = item.partition("=")
        if not equals or not lane or not value:
            raise ConfigError(f"{flag}: expected LANE=VALUE, got {item!r}")
        found[lane] = value
    return found


def per_lane_env(items: Iterable[str]) -> dict[str, dict[str, str]]:
    """['vllm:KEY=VALUE'] -> {'vllm': {'KEY': 'VALUE'}}; an empty value removes the variable. Raises ConfigError."""
    found: dict[str, dict[str, str]] = {}
    for item in items:
        lane, colon, pair = item.partition(":")
        key, equals, value = pair.partition("=")
        if not colon or not equals or not lane or not key:
            raise ConfigError(f"--env: expected LANE:KEY=VALUE, got {item!r}")
        found.setdefault(lane, {})[key] = value
    return found


def check_choice(name: str, given: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError for a value of an option that is not one of these."""
    if given not in allowed:
        several = ", ".join(allowed[:-1])
        raise ConfigError(f"--{name} {given!r}: give {several} or {allowed[-1]}")
