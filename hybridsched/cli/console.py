"""How commands print: tables, key-value lists, JSON. No other module of this room knows rich."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table; on a pipe nothing is cut off, so that it can be searched."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hybridsched.report.text import show

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(show(value)) for value in row))
    console = Console()
    Console(width=console.width if console.is_terminal else 10_000).print(table)


def print_pairs(pairs: Mapping[str, object]) -> None:
    """One ``name  value`` a line."""
    from hybridsched.report.text import show

    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        typer.echo(f"{name:<{width}}  {show(value)}")


def print_json(value: Any, *, flat: bool = False) -> None:
    """For programs: NaN and infinity, which JSON does not have, become null. flat: lists of numbers on one line."""
    text = json.dumps(_finite(value), indent=1, ensure_ascii=False)
    if flat:  # a raw line break never stands inside a JSON string, so only lists of numbers are met
        text = re.sub(r"\[\n[\s\d.,eE+-]+\n\s*\]", lambda found: "[" + " ".join(found[0][1:-1].split()) + "]", text)
    typer.echo(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
