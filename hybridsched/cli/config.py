"""`hybridsched config`: the documentation of run.yaml."""

from __future__ import annotations

from typing import Annotated

import typer


def config(
    section: Annotated[
        str | None, typer.Argument(help="A section or key, e.g. async_training or trainer.nnodes.", show_default="all")
    ] = None,
) -> None:
    """Explain the keys of run.yaml: type, default and meaning."""
    from hybridsched.config import render_docs

    typer.echo(render_docs(section), nl=False)
