"""Options of a command in groups, each a panel of its --help."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from typer.models import OptionInfo

F = TypeVar("F", bound=Callable[..., Any])


def grouped(panels: Mapping[str, Sequence[str]]) -> Callable[[F], F]:
    """Put a command's parameters into panels, {title: names}.

    Raises ValueError if an option is in no panel or in two.
    """

    def put(command: F) -> F:
        hints = get_type_hints(command, include_extras=True)
        places = [(name, title) for title, names in panels.items() for name in names]
        options = {n for n, h in hints.items() if any(isinstance(a, OptionInfo) for a in get_args(h))}
        if sorted(name for name, _ in places) != sorted(options):
            wrong = options.symmetric_difference(name for name, _ in places)
            raise ValueError(f"options in no panel or in two: {', '.join(sorted(wrong)) or 'two'}")
        for name, title in places:
            kind, *more = get_args(hints[name])
            found = [copy.copy(option) for option in more]
            for option in found:
                option.rich_help_panel = title
            hints[name] = Annotated[(kind, *found)]  # type: ignore[assignment]
        command.__annotations__ = hints
        return command

    return put
