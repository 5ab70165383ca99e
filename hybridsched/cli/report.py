"""`hybridsched report`: what happened in a run, as one HTML file or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    json: Annotated[bool, typer.Option("--json", help="Print the summary for programs, write nothing.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--open-html", metavar="PATH", help="Write the HTML here.", show_default="RUN/report.html"),
    ] = None,
) -> None:
    """Write the HTML report of a run (or print its summary as JSON)."""
    from hybridsched.cli.console import print_json
    from hybridsched.report.html import write_html
    from hybridsched.report.summary import summarize

    if json:
        print_json(summarize(run))
        return
    typer.echo(write_html(run, out if out is not None else run / "report.html"))
