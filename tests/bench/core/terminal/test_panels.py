"""Groups of options in --help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from fk_bench import cli
from fk_bench.core.terminal.panels import given, grouped
from rich.text import Text
from typer.testing import CliRunner


@dataclass(frozen=True)
class Size:
    PANEL: ClassVar[str] = "Sizes"

    width: Annotated[int, typer.Option(help="to the right")] = 3
    height: Annotated[int | None, typer.Option("--tall")] = None


@dataclass(frozen=True)
class Paint:
    PANEL: ClassVar[str] = "Paints"

    colors: Annotated[list[str] | None, typer.Option("--color")] = None
    width: Annotated[int, typer.Option()] = 2


@dataclass(frozen=True)
class Lost:
    PANEL: ClassVar[str] = "Lost"

    name: str = ""


def test_command_gets_its_options_in_groups() -> None:
    seen = []

    def draw(ctx: typer.Context, name: Annotated[str, typer.Argument(help="of a file")], size: Size) -> None:
        """Draw."""
        seen.append((name, size, given(ctx, size)))

    app = typer.Typer()
    app.command()(grouped(draw))
    assert CliRunner().invoke(app, ["box", "--tall", "5"]).exit_code == 0
    assert seen == [("box", Size(3, 5), {"height": 5})]
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert (
        "Draw." in text
        and "Sizes" in text
        and "to the right" in text
        and "of a file" in text
        and "--tall" in text
    )


def test_fields_that_are_no_options_are_refused() -> None:
    def lost(one: Lost) -> None: ...

    def twice(one: Size, other: Paint) -> None: ...

    with pytest.raises(ValueError, match=r"Lost\.name has no typer\.Option"):
        grouped(lost)
    with pytest.raises(ValueError, match="options in two groups: width"):
        grouped(twice)


def test_help_texts_have_no_markup() -> None:
    """`[/name]` and `[@name]` are tags of rich: --help would end in a traceback or lose them."""
    commands = typer.main.get_command(cli.build()).commands  # type: ignore[attr-defined]
    texts = [
        text.replace("\b", "")  # of click: keep the lines
        for command in commands.values()
        for text in (command.help, command.short_help, *(getattr(p, "help", None) for p in command.params))
        if text
    ]
    assert len(texts) > 400
    assert [text for text in texts if Text.from_markup(text, emoji=False).plain != text] == []
