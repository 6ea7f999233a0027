"""Output of commands: tables for people, one line of JSON for machines, one-line errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


def fail(message: str, status: int = 2, **more: Any) -> NoReturn:
    """Print an error on standard error, and for machines as the last line; end the command."""
    print(f"error: {message}", file=sys.stderr)
    last_line({**more, "ok": False, "error": next(iter(message.splitlines()), "")})
    raise SystemExit(status)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; wide cells are folded, never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(_cell(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(shown)
    console.print()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def last_line(data: dict[str, Any]) -> None:
    """Print the line of JSON that ends standard output: with --json, or into a pipe or a file."""
    if "--json" in sys.argv or not sys.stdout.isatty():
        print(json.dumps(data), flush=True)
