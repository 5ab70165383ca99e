"""`hybridsched cancel`: end a submitted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cancel(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]) -> None:
    """Cancel the Slurm job of a run; what was durable is kept, and it can be resumed."""
    from hybridsched.slurm.submission import run_in

    found = run_in(run)
    state = found.state()
    if state is None or state.is_over:
        typer.echo(f"job {found.job_id} is over already ({'unknown to Slurm' if state is None else state.told()})")
        return
    found.cancel()
    typer.echo(f"job {found.job_id} cancelled (it was {state.told()})")
    typer.echo(f"go on with it: hybridsched submit {run / 'config' / 'resolved.yaml'} --resume")
