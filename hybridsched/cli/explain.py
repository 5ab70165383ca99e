"""`hybridsched explain`: the story of one replica, worker, sample, segment or decision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    entity: Annotated[
        str, typer.Argument(metavar="ENTITY", help="E.g. hybrid.0, trainer.0, a sample's uid, decisions, faults.")
    ],
) -> None:
    """Tell the story of one entity from the run log: every event with its reason."""
    from hybridsched.report.explain import explain as story

    typer.echo(story(run, entity))
