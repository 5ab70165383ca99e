"""`hybridsched compare`: several runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of at least two runs.")],
) -> None:
    """Compare runs: wall clock, reward, utilization, lending."""
    from hybridsched.report.compare import compare as table

    typer.echo(table(runs))
