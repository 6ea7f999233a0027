"""Groups of options in --help."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from fk_bench.core.panels import grouped


def test_option_without_a_group_is_refused() -> None:
    def command(
        here: Annotated[int, typer.Option(help="a")] = 1, lost: Annotated[int, typer.Option()] = 2
    ) -> None: ...

    with pytest.raises(ValueError, match="lost"):
        grouped({"A": ["here"]})(command)
    with pytest.raises(ValueError, match="two"):
        grouped({"A": ["here", "lost"], "B": ["here"]})(command)
