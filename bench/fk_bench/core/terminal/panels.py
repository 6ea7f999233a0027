"""Options of a command in groups: each is a frozen dataclass, and a panel of --help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import typer
from typer.models import OptionInfo


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its parameters that are dataclasses.

    A field is an Annotated type with a typer.Option, and PANEL the title of its class. Raises ValueError for a field
    without an option, and for a name in two groups.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    found: list[inspect.Parameter] = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name not in groups
    ]
    for group in groups.values():
        found += _options(group)
    names = [parameter.name for parameter in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"options in two groups: {', '.join(twice)}")

    signature = inspect.Signature(found)

    @functools.wraps(command)
    def run(*args: Any, **more: Any) -> None:
        bound = signature.bind(*args, **more)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name, group in groups.items():
            own = {field.name: given.pop(field.name) for field in fields(group)}
            given[name] = group(**own)
        command(**given)

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    found = []
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        options = [part for part in get_args(hints[field.name])[1:] if isinstance(part, OptionInfo)]
        if not options:
            raise ValueError(f"{group.__name__}.{field.name} has no typer.Option")
        options[0].rich_help_panel = group.PANEL
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
        )
    return found


def given(context: typer.Context, *groups: Any) -> dict[str, Any]:
    """{name: value} of the options of these groups that are on the command line."""
    chosen = {}
    for group in groups:
        for field in fields(group):
            source = context.get_parameter_source(field.name)
            if source is not None and source.name == "COMMANDLINE":
                chosen[field.name] = getattr(group, field.name)
    return chosen
